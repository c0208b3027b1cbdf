"""Kernels are chosen by the time of whole steps, one more as long as it helps."""

import pytest

from pallas_kernels.measured import worthwhile
from pallas_kernels.shapes import SMALL
from scripts.gpu.selection import Subject, select

SUBJECT = Subject(SMALL, 2, 40, "made up")
DECODE = {"decode": ("a", "b", "c")}


def clock(by_ops, failing=()):
    """Times by kind and set of kernels; ops of `failing` fail in every step."""

    def times_us(kind, choices):
        return [
            None if set(ops) & set(failing) else by_ops(kind, frozenset(ops)) for ops in choices
        ]

    return times_us


def saving(**saved):
    return clock(lambda kind, ops: 100.0 - sum(saved.get(op, 0.0) for op in ops))


def row(selection, op, step="decode"):
    return next(m for m in selection.measured if (m.op, m.step) == (op, step))


def test_the_best_comes_first_and_what_saves_less_than_the_margin_stays_out():
    chosen = select(SUBJECT, DECODE, saving(a=10, b=30, c=1))
    assert chosen.ops == ("b", "a")
    assert (row(chosen, "a").xla_us, row(chosen, "a").gpu_us) == (70, 60)
    assert (row(chosen, "c").xla_us, row(chosen, "c").gpu_us) == (60, 59)


def test_kernels_that_help_only_alone_are_not_both_chosen():
    together = frozenset("ab")
    times = clock(lambda kind, ops: 95.0 if together <= ops else {0: 100.0}.get(len(ops), 90.0))
    assert select(SUBJECT, {"decode": ("a", "b")}, times).ops == ("a",)


def test_a_kernel_that_helps_only_beside_another_is_found():
    def by_ops(kind, ops):
        return 80.0 if {"a", "b"} <= ops else 90.0 if "a" in ops else 100.0

    assert select(SUBJECT, {"decode": ("b", "a")}, clock(by_ops)).ops == ("a", "b")


@pytest.mark.parametrize(("prefill_us", "ops"), [(100.0, ("a",)), (103.0, ())])
def test_a_kernel_of_two_kinds_of_step_must_harm_neither(prefill_us, ops):
    def by_ops(kind, chosen):
        return 100.0 if not chosen else 50.0 if kind == "decode" else prefill_us

    found = select(SUBJECT, {"decode": ("a",), "prefill": ("a",)}, clock(by_ops))
    assert found.ops == ops and len(found.measured) == 2


def test_each_op_is_measured_in_the_steps_that_have_it():
    chosen = select(SUBJECT, {"decode": ("a", "c"), "prefill": ("b", "c")}, saving(a=10, b=20))
    assert {(m.op, m.step) for m in chosen.measured} == {
        ("a", "decode"), ("b", "prefill"), ("c", "decode"), ("c", "prefill"),
    }  # fmt: skip


def test_a_kernel_that_fails_is_neither_chosen_nor_measured():
    failing = clock(lambda kind, ops: 100.0 - 10 * len(ops), failing=("b",))
    chosen = select(SUBJECT, {"decode": ("a", "b"), "prefill": ("b",)}, failing)
    assert chosen.ops == ("a",)
    assert {m.op for m in chosen.measured} == {"a"}


def test_steps_that_fail_without_kernels_are_an_error():
    with pytest.raises(ValueError, match="the decode step fails with XLA alone"):
        select(SUBJECT, DECODE, lambda kind, choices: [None] * len(choices))


def test_what_is_chosen_is_what_the_measurements_say():
    chosen = select(SUBJECT, DECODE, saving(a=2, b=3, c=1.5))
    by_op = {op: [m for m in chosen.measured if m.op == op] for op in "abc"}
    assert {op for op in by_op if worthwhile(by_op[op])} == set(chosen.ops)

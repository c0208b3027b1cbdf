"""The evaluation, driven by models that can be computed by hand."""

import pytest

from scripts.nano import tasks
from scripts.nano.corpus import Encoder
from scripts.nano.evaluation import MODES, evaluate, table, wilson
from tests.scripts.nano_model import nano_tokenizer

TOKENIZER = nano_tokenizer()


def test_a_perfect_adder_gets_every_sum_and_a_mute_model_none():
    encoder = Encoder(TOKENIZER)

    def adder(prompts):
        replies = []
        for prompt in prompts:
            thinking = TOKENIZER.decode(prompt[-2:-1]) == "think"
            text = TOKENIZER.decode(prompt).split('role="user"<|sep|>')[1].split("<|close|>")[0]
            digits = "".join(char if char.isdigit() else " " for char in text).split()
            a, b = map(int, digits)
            working = "" if thinking else f"{tasks.carry_steps(a, b)}: "
            message = {"role": "assistant", "content": f"{working}{a}+{b}={a + b}"}
            replies.append(encoder.reply(message, MODES["on" if thinking else "off"]))
        return replies

    perfect = evaluate(adder, TOKENIZER, count=7, names=["sum"], batch=3)
    assert [(one.thinking, one.right, one.count) for one in perfect] == [
        ("off", 7, 7),
        ("on", 7, 7),
    ]
    mute = evaluate(
        lambda prompts: [[] for _ in prompts], TOKENIZER, count=3, names=["call", "sum"]
    )
    assert [one.right for one in mute] == [0, 0, 0, 0]
    assert table(mute).count("\n") == 5


@pytest.mark.parametrize(
    ("right", "count", "low", "high"), [(0, 10, 0.0, 0.278), (95, 100, 0.888, 0.978)]
)
def test_wilson_interval_has_its_known_values(right, count, low, high):
    assert wilson(right, count) == pytest.approx((low, high), abs=1e-3)

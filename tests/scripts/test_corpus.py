"""Training batches: what is learnt is what the model must produce, and nothing else."""

import numpy as np
import pytest

from k3jax.chat.parser import parse_output
from scripts.nano.corpus import (
    LONG,
    RAMP,
    SHORT,
    TASK_NAMES,
    Encoder,
    Mode,
    conversation,
    held_out,
    held_out_row,
    make_batch,
)
from tests.scripts.nano_model import nano_tokenizer

TOKENIZER = nano_tokenizer()
ENCODER = Encoder(TOKENIZER)


def runs(row):
    """The learnt stretches of a row, with the ids before each."""
    edges = np.flatnonzero(np.diff(np.r_[-1, row.task, -1] >= 0))
    return [(row.tokens[:a].tolist(), row.tokens[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("kind", ["plain", "recall", "tools", "json"])
def test_learnt_tokens_are_whole_replies_after_a_generation_prompt(kind):
    rng = np.random.default_rng(5)
    special = TOKENIZER.special_ids
    for _ in range(10):
        row = conversation(ENCODER, rng, 384, recall_size=0.2, kinds={kind: 1.0})
        assert len(row.tokens) <= 384
        stretches = runs(row)
        assert stretches
        for before, learnt in stretches:
            assert before[-1] == special["<|sep|>"]
            channel = TOKENIZER.decode(before[-2:-1])
            assert channel in ("think", "response")
            assert before[-3] == special["<|open|>"]
            assert learnt[-1] == special["<|end_of_msg|>"]
            assert learnt.count(special["<|end_of_msg|>"]) == 1
            parsed = parse_output(TOKENIZER, learnt, thinking=channel == "think")
            assert parsed.content or parsed.tool_calls
            assert parsed.partial_call is None


def test_row_ids_are_those_of_the_chat_encoder():
    rng = np.random.default_rng(6)
    for mode in (Mode(False), Mode(True, "high")):
        for name in TASK_NAMES[:-1]:
            one = held_out(rng, name)
            row = held_out_row(ENCODER, one, mode)
            whole = ENCODER.prompt(one, mode) + ENCODER.reply(one.messages[-1], mode)
            assert row.tokens.tolist() == whole
            assert row.tokens[row.task >= 0].tolist() == whole[-(row.task >= 0).sum() :]


def test_a_batch_depends_on_seed_and_step_alone():
    first, again = (make_batch(Encoder(TOKENIZER), 3, 7, 0.4) for _ in range(2))
    assert np.array_equal(first.tokens, again.tokens)
    assert np.array_equal(first.task, again.task)
    other = make_batch(ENCODER, 3, 8, 0.4)
    assert other.tokens.shape != first.tokens.shape or (other.tokens != first.tokens).any()


def test_batches_have_two_shapes_and_long_ones_wait_for_the_ramp():
    late = {make_batch(ENCODER, 0, step, 0.9).tokens.shape for step in range(12)}
    assert late == {SHORT, LONG}
    early = {make_batch(ENCODER, 0, step, RAMP / 4).tokens.shape for step in range(12)}
    assert early == {SHORT}


def test_padding_is_never_learnt():
    batch = make_batch(ENCODER, 1, 2, 0.9)
    beyond = np.arange(batch.tokens.shape[1]) >= batch.lengths[:, None]
    assert (batch.task[beyond] == -1).all()
    assert (batch.tokens[beyond] == 0).all()

"""Jitted generation: it yields what the whole forward pass says, whoever the neighbours are.

Compiling dominates, so all tests share a few shapes: three rows of short prompts, one row of a long
prompt, one row with images.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from k3jax.config import K3Config
from k3jax.engine.generate import MAX_SPAN, PAGE_SIZE, PromptImages, generate, stream
from k3jax.engine.images import image_features
from k3jax.engine.request import FinishReason, SamplingParams
from k3jax.model import backbone
from k3jax.weights.hf import load
from tests.helpers import K3_TINY
from tests.random_weights import random_weights, two_layer_config

CONTEXT = 1024
LENGTHS = (1, 41, 61)
NEW = 12
STOP_PLACE = 5
CONFIG = replace(two_layer_config(), max_context=CONTEXT)

forward = jax.jit(backbone.forward_logits, static_argnums=1)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(0, 89, length).tolist()


PROMPTS = [prompt_of(length) for length in LENGTHS]


def full_logits(weights, tokens) -> np.ndarray:
    """Logits after each of at most 80 tokens, from one forward pass without state."""
    padded = np.zeros((1, 80), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(forward(weights, CONFIG, padded, np.array([len(tokens)], np.int32)))[0]


@pytest.fixture(scope="module")
def tiny():
    """Weights, and a config one of whose end ids is what the second prompt's answer reaches."""
    weights = random_weights(CONFIG, seed=7)
    answer: list[int] = []
    while len(answer) <= STOP_PLACE:
        tokens = [*PROMPTS[1], *answer]
        answer.append(int(full_logits(weights, tokens)[len(tokens) - 1].argmax()))
    return weights, replace(CONFIG, eos_token_ids=(95, answer[-1]))


def run(tiny, prompts, settings) -> list:
    """`generate` over three rows, always with the same two programs.

    Two more rows keep log-probabilities and token counts in use, and make padding rows necessary.
    """
    assert len(prompts) == 3 and max(map(len, prompts)) == max(LENGTHS)
    others = [free(logprobs=3, presence_penalty=0.5), SamplingParams(max_tokens=2)]
    settings = [replace(one, logprobs=3) for one in settings]
    return generate(*tiny, [*prompts, PROMPTS[0], PROMPTS[0]], [*settings, *others])[:3]


def free(**changes) -> SamplingParams:
    """Greedy, and not stopped by an id that comes up by chance."""
    return SamplingParams(**{"max_tokens": NEW, "ignore_eos": True, **changes})


@pytest.fixture(scope="module")
def greedy(tiny):
    return run(tiny, PROMPTS, [free()] * 3)


def test_greedy_is_the_argmax_of_the_full_forward(tiny, greedy):
    for prompt, done in zip(PROMPTS, greedy, strict=True):
        assert (done.prompt_tokens, len(done.tokens)) == (len(prompt), NEW)
        assert done.finish_reason is FinishReason.LENGTH
        logits = full_logits(tiny[0], [*prompt, *done.tokens])[len(prompt) - 1 :]
        assert tuple(logits[:NEW].argmax(-1)) == done.tokens


def test_logprobs_are_the_log_softmax_of_the_full_forward(tiny, greedy):
    for prompt, done in zip(PROMPTS, greedy, strict=True):
        logits = full_logits(tiny[0], [*prompt, *done.tokens]).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        assert len(done.logprobs) == NEW
        for place, found in enumerate(done.logprobs):
            row = expected[len(prompt) - 1 + place]
            assert found.chosen == pytest.approx(row[done.tokens[place]], abs=1e-4)
            ids, values = zip(*found.top, strict=True)
            assert len(ids) == 3 and found.top[0] == (done.tokens[place], found.chosen)
            np.testing.assert_allclose(values, row[list(ids)], atol=1e-4)
            np.testing.assert_allclose(values, np.sort(row)[::-1][:3], atol=1e-4)


def test_a_row_does_not_depend_on_its_neighbours(tiny):
    mine = free(temperature=0.9, top_p=0.9, seed=41)
    others = [free(), free(temperature=1.4, seed=3), free(top_k=2, temperature=1.0, min_p=0.2)]
    alone = run(tiny, [PROMPTS[1], PROMPTS[2], PROMPTS[0]], [mine, *others[:2]])[0]
    for place in (1, 2):
        prompts = [prompt_of(length, 10 + place) for length in (61, 3, 59)]
        settings = [others[2], others[place], others[1]]
        prompts[place], settings[place] = PROMPTS[1], mine
        found = run(tiny, prompts, settings)[place]
        assert found.tokens == alone.tokens
        chosen = [one.chosen for one in found.logprobs]
        assert chosen == pytest.approx([one.chosen for one in alone.logprobs], abs=1e-4)


def test_seeds_repeat_and_differ(tiny):
    prompts = [PROMPTS[2]] * 3
    settings = [free(temperature=1.5, seed=seed) for seed in (1, 2**63 - 1, 1)]
    first, second = run(tiny, prompts, settings), run(tiny, prompts, settings)
    assert [one.tokens for one in first] == [one.tokens for one in second]
    assert first[0].tokens == first[2].tokens != first[1].tokens


def test_stop_ids_end_their_own_row(tiny, greedy):
    tokens = [done.tokens for done in greedy]
    settings = [
        free(stop_ids=(tokens[0][0],)),
        free(stop_ids=(96, tokens[1][4])),
        free(max_tokens=16),
    ]
    found = run(tiny, PROMPTS, settings)
    assert found[0].tokens == tokens[0][:1]
    assert found[1].tokens == tokens[1][: tokens[1].index(tokens[1][4]) + 1]
    assert found[2].tokens[:NEW] == tokens[2] and len(found[2].tokens) == 16
    assert [one.finish_reason for one in found] == ["stop", "stop", "length"]


def test_every_end_id_of_the_model_stops_unless_ignored(tiny, greedy):
    settings = [free(), SamplingParams(max_tokens=NEW), free()]
    found = run(tiny, PROMPTS, settings)[1]
    end = greedy[1].tokens.index(tiny[1].eos_token_ids[1]) + 1
    assert found.tokens == greedy[1].tokens[:end] and end <= STOP_PLACE + 1
    assert found.finish_reason is FinishReason.STOP
    assert len(greedy[1].tokens) == NEW


def test_max_tokens_zero_and_one(tiny, greedy):
    found = run(tiny, PROMPTS, [free(max_tokens=n) for n in (0, 1, NEW)])
    assert [len(one.tokens) for one in found] == [0, 1, NEW]
    assert found[1].tokens == greedy[1].tokens[:1]
    assert all(one.finish_reason is FinishReason.LENGTH for one in found)
    assert [len(one.logprobs) for one in found] == [0, 1, NEW]


def test_rows_of_very_different_budgets_end(tiny, greedy):
    """The longest prompt asks for least, so that no row needs the last page."""
    found = run(tiny, PROMPTS, [free(max_tokens=n) for n in (NEW, NEW, 4)])
    assert [one.tokens for one in found] == [
        greedy[0].tokens, greedy[1].tokens, greedy[2].tokens[:4]
    ]  # fmt: skip


def test_stop_id_as_the_last_allowed_token_counts_as_stop(tiny, greedy):
    token = greedy[1].tokens[0]
    found = run(tiny, PROMPTS, [free(), free(max_tokens=1, stop_ids=(token,)), free()])
    assert found[1].finish_reason is FinishReason.STOP


def test_penalties_count_prompt_and_output(tiny):
    settings = [
        free(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=3.0),
        free(frequency_penalty=-0.7),
        free(),
    ]
    found = run(tiny, PROMPTS, settings)
    for row, (prompt, setting) in enumerate(zip(PROMPTS, settings, strict=True)):
        tokens = found[row].tokens
        logits = full_logits(tiny[0], [*prompt, *tokens]).astype(np.float64)
        for place, token in enumerate(tokens):
            scores = logits[len(prompt) - 1 + place]
            counts = np.bincount(tokens[:place], minlength=97)
            known = (counts > 0) | np.isin(np.arange(97), prompt)
            factor = setting.repetition_penalty
            scaled = np.where(scores > 0, scores / factor, scores * factor)
            scores = np.where(known, scaled, scores) - setting.presence_penalty * (counts > 0)
            scores = scores - setting.frequency_penalty * counts
            assert scores[token] >= scores.max() - 1e-4, (row, place)
    assert len(set(found[0].tokens)) == NEW


@pytest.fixture(scope="module")
def long(tiny):
    """A prompt over two spans, of one width, and sixteen pages, to the end of the context."""
    prompt = prompt_of(CONTEXT - 5)
    assert MAX_SPAN < len(prompt) < 2 * MAX_SPAN and len(prompt) % PAGE_SIZE
    return prompt, generate(*tiny, [prompt], free())[0]


def test_prompt_of_several_spans_gives_what_the_full_forward_gives(tiny, long):
    weights, config = tiny
    prompt, done = long
    sequence = np.array([[*prompt, *done.tokens]], np.int32)
    logits = np.asarray(forward(weights, config, sequence))[0]
    assert tuple(logits[len(prompt) - 1 : -1].argmax(-1)) == done.tokens


def test_context_ends_a_sequence(long):
    _, done = long
    assert len(done.tokens) == 5
    assert done.finish_reason is FinishReason.LENGTH


def test_stream_yields_what_generate_returns(tiny, long):
    prompt, done = long
    pairs = list(stream(*tiny, prompt, free()))
    assert tuple(token for token, _ in pairs) == done.tokens
    assert [reason for _, reason in pairs] == [None] * 4 + [FinishReason.LENGTH]
    token = done.tokens[2]
    stopped = list(stream(*tiny, prompt, free(stop_ids=(token,))))
    assert stopped[-1] == (token, FinishReason.STOP)
    assert len(stopped) == done.tokens.index(token) + 1
    assert list(stream(*tiny, prompt, free(max_tokens=0))) == []


def test_looking_at_more_of_the_page_table_as_rows_grow_changes_nothing(tiny, greedy, monkeypatch):
    monkeypatch.setattr(
        "k3jax.engine.generate.MIN_CONTEXT", PAGE_SIZE
    )  # the longest row outgrows it
    assert run(tiny, PROMPTS, [free()] * 3) == greedy


@pytest.fixture(scope="module")
def vision():
    config = K3Config.from_hf(K3_TINY)
    weights = load(K3_TINY, config, progress=False)
    with np.load(K3_TINY / "vision.npz") as archive:
        return weights, config, {name: archive[name] for name in archive.files}


def test_images_give_the_released_features(vision):
    weights, config, golden = vision
    grids = [tuple(int(n) for n in grid) for grid in golden["grid_thws"]]
    ends = np.cumsum([np.prod(grid) for grid in grids])
    pixels = np.split(golden["pixel_values"], ends[:-1])
    found = image_features(weights.vision, config.vision, list(zip(pixels, grids, strict=True)))
    np.testing.assert_allclose(found, golden["features"], atol=3e-4)


def test_images_enter_the_prompt_in_order_also_across_spans(vision, monkeypatch):
    monkeypatch.setattr("k3jax.engine.generate.MAX_SPAN", 16)  # images begin and end in any span
    weights, config, golden = vision
    row = golden["expanded_input_ids"].reshape(-1).tolist()
    assert row.count(config.vision.media_token_id) == len(golden["features"])
    images = PromptImages(golden["features"])
    once = SamplingParams(max_tokens=1, logprobs=5)
    (done,) = generate(weights, config, [row], once, images=[images])
    logits = golden["logits"].reshape(-1, config.vocab_size)[-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    assert done.logprobs is not None
    ids, values = zip(*done.logprobs[0].top, strict=True)
    assert done.tokens[0] == ids[0] == logits.argmax()
    np.testing.assert_allclose(values, expected[list(ids)], atol=1e-3)


def test_images_that_do_not_fit_the_prompt_are_an_error(vision, tiny):
    weights, config, golden = vision
    images = PromptImages(golden["features"][:3])
    media = config.vision.media_token_id
    with pytest.raises(ValueError, match="prompt 0 has 2 media tokens, but its images have 3"):
        generate(weights, config, [[media, media]], images=[images])
    with pytest.raises(ValueError, match="2 entries of images for 1 prompts"):
        generate(weights, config, [[media] * 3], images=[images, None])
    with pytest.raises(ValueError, match="no vision tower"):
        generate(*tiny, [[1]], images=[images])


def test_no_prompts_is_no_work(tiny):
    assert generate(*tiny, []) == []


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([[1], []], None, "^prompt 1 is empty"),
        ([[1] * CONTEXT], None, f"^prompt 0 has {CONTEXT} tokens, but the model's context"),
        ([[1, 97]], None, "^prompt 0: token id 97 at position 1"),
        ([[1]], SamplingParams(stop_ids=(97,)), "^prompt 0: stop id 97"),
        ([[1]], [SamplingParams()] * 2, "^2 sampling settings for 1 prompts"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tiny, prompts, sampling, message):
    with pytest.raises(ValueError, match=message):
        generate(*tiny, prompts, sampling)
    if not isinstance(sampling, list):
        with pytest.raises(ValueError, match=message.replace("prompt 0", "prompt").split(" 1")[0]):
            list(stream(*tiny, prompts[-1], sampling))

"""Both forms of latent attention equal the plain one, for any span, position and padding."""

import jax
import numpy as np
import pytest

from pallas_kernels.mla import mla_absorbed, mla_expanded, prefers_expanded
from pallas_kernels.mla.reference import mla_reference

FORMS = {"absorbed": mla_absorbed, "expanded": mla_expanded}


def random_case(rows, tokens, heads, context, seed=0, rank=24, nope=16, shared=8, value=12):
    rng = np.random.default_rng([seed, rows, tokens, heads, context])
    q = rng.normal(size=(rows, tokens, heads, nope + shared)).astype(np.float32)
    latents = rng.normal(size=(rows, context, rank + shared)).astype(np.float32)
    kv_up = rng.normal(size=(heads, nope + value, rank)).astype(np.float32)
    starts = rng.integers(0, context - tokens + 1, rows).astype(np.int32)
    return q, latents, kv_up, starts


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "context"),
    [(1, 1, 1, 1), (1, 1, 8, 64), (3, 1, 5, 37), (16, 1, 8, 64), (2, 7, 3, 11), (1, 300, 2, 311)],
)
def test_form_equals_plain_attention(form, rows, tokens, heads, context):
    case = random_case(rows, tokens, heads, context)
    found = jax.jit(FORMS[form])(*case)
    np.testing.assert_allclose(found, mla_reference(*case), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [2, 9, 16, 17, 32, 33, 71, 72])
def test_every_form_of_a_few_queries(count):
    """Numbers of queries on both sides of each bound at which `mla_absorbed` changes its form."""
    for rows, heads in ((count, 2), (1, count)):
        case = random_case(rows, 1, heads, 21, value=13)
        found = jax.jit(mla_absorbed)(*case)
        np.testing.assert_allclose(found, mla_reference(*case), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [9, 33])
def test_gradients_of_a_few_queries_are_those_of_plain_attention(count):
    case = random_case(count, 1, 2, 21, value=13)

    def energy(attend):
        return jax.jit(jax.grad(lambda *given: (attend(*given, case[3]) ** 2).sum(), (0, 1, 2)))

    for found, wanted in zip(
        energy(mla_absorbed)(*case[:3]), energy(mla_reference)(*case[:3]), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("form", FORMS)
def test_later_positions_do_not_matter(form):
    q, latents, kv_up, starts = random_case(2, 3, 4, 29)
    changed = latents.copy()
    for row, start in enumerate(starts):
        changed[row, start + 3 :] = 1e3
    run = jax.jit(FORMS[form])
    np.testing.assert_array_equal(run(q, latents, kv_up, starts), run(q, changed, kv_up, starts))


@pytest.mark.parametrize("form", FORMS)
def test_shapes_that_do_not_fit_are_refused(form):
    q, latents, kv_up, starts = random_case(2, 3, 4, 29)
    with pytest.raises(ValueError, match=r"do not fit|does not match"):
        FORMS[form](q[:, :, :3], latents, kv_up, starts)
    with pytest.raises(ValueError, match=r"do not fit|does not match"):
        FORMS[form](q, latents[..., :20], kv_up, starts)


def test_long_spans_expand_and_single_tokens_absorb():
    sizes = {"rank": 512, "nope": 128, "shared": 64, "value": 128}
    assert not prefers_expanded(tokens=1, context=4096, **sizes)
    assert prefers_expanded(tokens=512, context=512, **sizes)

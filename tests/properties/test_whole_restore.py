"""Law 3: what went to the host and came back is what was there, both halves, bit for bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.cache.offload import HostTier
from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from k3jax.engine.request import Request, SamplingParams
from tests.helpers import tiny_config
from tests.random_weights import random_weights, two_layer_config

PAGE, CONTEXT, REPLY = 8, 64, 4
CONFIG = replace(tiny_config(), eos_token_ids=())
SMALL = replace(two_layer_config(), eos_token_ids=())
PARAMS = {config: random_weights(config) for config in (CONFIG, SMALL)}


class HostEngine(Engine):
    host: HostTier


def make_engine(config=CONFIG, *, host_bytes=1 << 24, dtype=jnp.float32, **changes) -> HostEngine:
    sizes = EngineConfig(
        max_rows=2,
        max_context=CONTEXT,
        page_size=PAGE,
        num_pages=10,
        num_slots=5,
        prefill_shapes=((1, 32),),
        decode_rows=(2,),
        contexts=(CONTEXT,),
        host_bytes=host_bytes,
        host_least_tokens=1,
        dtype=dtype,
    )
    return HostEngine(PARAMS[config], config, replace(sizes, **changes))


def reply(engine: HostEngine, prompt, name: str = "a"):
    """(tokens, log-probabilities of the first, tokens taken from the cache)."""
    engine.submit(Request(name, tuple(prompt), SamplingParams(max_tokens=REPLY, logprobs=20)))
    events = list(engine.run())
    first = events[0].logprobs
    assert first is not None
    values = {token: value for token, value in first.top}
    return [event.token for event in events], values, events[0].cached_tokens


def lose_everything(engine: Engine) -> None:
    """Every cached prefix gives way, and what the pools then hold is poison."""
    store = engine.store
    pages = store.take_pages(store.pages.size)
    assert pages is not None
    store.pages.release(pages)
    decode = engine.state.decode
    poisoned = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), decode)
    assert store.slots.num_free == store.slots.size
    engine.state = engine.state.replace(decode=poisoned)


def prefix_bits(engine: Engine, entry) -> list[np.ndarray]:
    """Every bit of a prefix's two halves, of the positions that count."""
    decode = engine.state.decode
    halves = [np.asarray(pool)[entry.slot] for pool in jax.tree.leaves(decode.recurrent)]
    for pool in decode.latent.pages:
        latents = np.asarray(pool)[list(entry.pages)]
        halves.append(latents.reshape(-1, latents.shape[-1])[: entry.num_tokens])
    return [half.view(f"u{half.dtype.itemsize}") for half in halves]


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.one_of(st.integers(2, 45), st.sampled_from([7, 8, 9, 16, 31, 32, 33, 40])),
    more=st.integers(1, 8),
)
def test_a_reply_after_offload_and_load_is_that_of_a_fresh_engine(seed, length, more):
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, CONFIG.vocab_size, length).tolist()
    engine, kept = make_engine(), make_engine(host_bytes=0)
    first, _, _ = reply(engine, prompt)
    assert reply(kept, prompt)[0] == first
    follow_up = [*prompt, *first, *rng.integers(0, CONFIG.vocab_size, more).tolist()]
    lose_everything(engine)
    tokens, values, cached = reply(engine, follow_up)
    assert engine.stats().host_hits == 1
    assert cached == length + REPLY - 1
    assert (tokens, values, cached) == reply(kept, follow_up)
    fresh_tokens, fresh_values, none = reply(make_engine(prefix_cache=False), follow_up)
    assert tokens == fresh_tokens and none == 0
    for token in values.keys() & fresh_values.keys():
        assert values[token] == pytest.approx(fresh_values[token], abs=1e-4)
    engine.scheduler.check()
    engine.host.check()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("length", [5, 13, 37])
def test_both_halves_come_back_bit_for_bit_at_one_token_count(dtype, length):
    engine = make_engine(SMALL if dtype == jnp.bfloat16 else CONFIG, dtype=dtype)
    prompt = np.random.default_rng(length).integers(0, CONFIG.vocab_size, length).tolist()
    reply(engine, prompt)
    before = {e.tokens: prefix_bits(engine, e) for e in engine.store.tree.entries()}
    lose_everything(engine)
    assert not list(engine.store.tree.entries())
    for tokens in before:
        assert engine.host.promote([*tokens, 0], len(tokens), 0)
    after = {e.tokens: prefix_bits(engine, e) for e in engine.store.tree.entries()}
    assert after.keys() == before.keys() and max(map(len, after)) == length + REPLY - 1
    for tokens, bits in before.items():
        for was, now in zip(bits, after[tokens], strict=True):
            np.testing.assert_array_equal(now, was)


def test_prefixes_return_while_others_run_and_the_pools_are_small():
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in (30, 23, 41, 17, 8, 32)]
    expected = [reply(make_engine(prefix_cache=False), prompt)[0] for prompt in prompts]
    engine = make_engine()
    for turn in range(3):
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=REPLY)
            engine.submit(Request(f"{turn}.{number}", tuple(prompt), sampling))
        found = {str(number): [] for number in range(len(prompts))}
        for event in engine.run():
            found[event.request_id.split(".")[1]].append(event.token)
            engine.scheduler.check()
            engine.host.check()
        assert list(found.values()) == expected
    assert engine.stats().host_hits > 0


def test_nothing_goes_to_the_host_without_memory_for_it():
    engine = make_engine(host_bytes=0)
    reply(engine, range(20))
    lose_everything(engine)
    assert engine.host is None
    assert reply(engine, range(20))[2] == 0
    stats = engine.stats()
    assert (stats.host_entries, stats.host_bytes, stats.host_hits) == (0, 0, 0)


def test_flush_cache_empties_the_host_too():
    engine = make_engine()
    reply(engine, range(20))
    lose_everything(engine)
    assert engine.stats().host_entries > 0
    engine.flush_cache()
    assert engine.stats().host_entries == engine.stats().host_bytes == 0
    assert reply(engine, range(20))[2] == 0


def test_nothing_compiles_after_warm_up(caplog):
    engine = make_engine(SMALL)
    engine.warm_up()
    jax.config.update("jax_log_compiles", True)
    try:
        reply(engine, range(50))
        lose = engine.store.take_pages(engine.store.pages.size)
        engine.store.pages.release(lose)
        assert reply(engine, range(60))[2] == 48
    finally:
        jax.config.update("jax_log_compiles", False)
    assert engine.stats().host_hits == 1
    compiled = [r.getMessage() for r in caplog.records if "Finished XLA compil" in r.getMessage()]
    assert compiled == []

"""The memory plan: what it says is what the engine then holds."""

import jax
import jax.numpy as jnp
import pytest

from k3jax.engine.engine import Engine
from k3jax.engine.engine_config import EngineConfig
from k3jax.model.params import init
from serving.memory import MemoryPlan, NotEnoughMemory, num_bytes, plan_memory, program_bytes, size
from tests.helpers import tiny_config


def test_plan_equals_what_the_engine_allocates():
    config = tiny_config()
    params = init(config, jax.random.key(0))
    sizes = EngineConfig(max_rows=3, max_context=128, num_pages=7, num_slots=5)

    plan = plan_memory(params, config, sizes.resolve(config))

    state = Engine(params, config, sizes).state
    assert plan.pools == {
        "recurrent slots": num_bytes(state.decode.recurrent),
        "latent pages": num_bytes(state.decode.latent),
        "token histories": num_bytes(state.history),
    }
    assert plan.wanted == num_bytes(state.decode) + num_bytes(state.history)
    assert plan.weights == num_bytes(params)


def test_pools_that_do_not_fit_are_refused_with_both_numbers():
    with pytest.raises(
        NotEnoughMemory, match=r"5 GB for the caches, 5 GB in all, but 4 GB are free"
    ):
        MemoryPlan(10, {"latent pages": 5 * 10**9}, free=4 * 10**9).check()


def test_pools_that_fit_or_cannot_be_judged_are_accepted():
    MemoryPlan(10, {"latent pages": 100}, free=1000).check()
    MemoryPlan(10, {"latent pages": 100}, free=None).check()


def test_the_largest_program_counts_and_only_that():
    plan = MemoryPlan(10, {"latent pages": 600}, free=1000).with_program("step", 300)

    plan.with_program("step", 200).with_program("tower", 350).check()
    with pytest.raises(NotEnoughMemory, match=r"300 B for the step and 351 B for the tower, 951 B"):
        plan.with_program("tower", 351).check()


def test_a_programs_bytes_are_those_it_has_beside_its_arguments():
    donating = jax.jit(lambda x, y: (x + 1, jnp.outer(y, y) @ y), donate_argnums=0)
    x, y = jnp.zeros(1000), jnp.ones(32)

    analysis = donating.lower(x, y).compile().memory_analysis()

    assert 4 * 32 <= program_bytes(analysis) < 4 * 1000 + 4 * 32 * 32
    assert program_bytes(None) == 0


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (5816, "5.82 kB"), (17.7e6, "17.7 MB")]
)
def test_sizes_have_three_digits(number: float, text: str):
    assert size(int(number)) == text

"""Reference-counted ids: given once, shared by count, and accounted for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3jax.cache.pool import Pool, PoolExhausted


@pytest.mark.parametrize("size", [1, 7])
def test_every_id_is_given_once_and_no_more(size):
    pool = Pool("slots", size)
    assert sorted(pool.take() for _ in range(size)) == list(range(size))
    assert pool.num_free == 0
    with pytest.raises(PoolExhausted, match=f"all {size} slots"):
        pool.take()


def test_an_id_is_free_after_its_last_owner_gives_it_back():
    pool = Pool("pages", 2)
    item = pool.take()
    pool.share([item, item])
    for owners in (3, 2, 1):
        assert pool.count(item) == owners and item not in pool.free_ids()
        pool.release([item])
    assert sorted(pool.free_ids()) == [0, 1]


@pytest.mark.parametrize("act", [Pool.share, Pool.release])
def test_a_free_id_can_be_neither_shared_nor_released(act):
    pool = Pool("pages", 3)
    with pytest.raises(ValueError, match=r"pages: 1 is .*free"):
        act(pool, [1])


def test_a_pool_has_at_least_one_id():
    with pytest.raises(ValueError, match="pages = 0, expected at least 1"):
        Pool("pages", 0)


@given(moves=st.lists(st.tuples(st.sampled_from("tsr"), st.integers(0, 4)), max_size=40))
def test_check_tells_the_true_owners_from_any_others(moves):
    pool, held = Pool("pages", 5), dict.fromkeys(range(5), 0)
    for move, item in moves:
        if move == "t" and pool.num_free:
            held[pool.take()] += 1
        elif move == "s" and held[item]:
            pool.share([item])
            held[item] += 1
        elif move == "r" and held[item]:
            pool.release([item])
            held[item] -= 1
    pool.check(held)
    for item in range(5):
        with pytest.raises(AssertionError, match="pages"):
            pool.check({**held, item: held[item] + 1})

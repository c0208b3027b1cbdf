"""Pages and slots for running sequences first, for cached prefixes with what is left."""

import pytest

from k3jax.cache.prefix import PrefixEntry
from k3jax.cache.store import PrefixStore


def make_store(**changes) -> PrefixStore:
    return PrefixStore(**{"num_pages": 6, "num_slots": 3, "page_size": 4, **changes})


def publish(store: PrefixStore, tokens, pages: list[int] | None = None) -> PrefixEntry:
    """Cache `tokens`; fresh pages and the slot are then the cache's alone."""
    taken = pages or store.take_pages(-(-len(tokens) // store.page_size))
    slot = store.take_slot()
    assert taken is not None and slot is not None
    entry = PrefixEntry(tuple(tokens), tuple(taken), slot)
    store.publish(entry)
    store.slots.release([slot])
    if pages is None:
        store.pages.release(taken)
    return entry


def test_cached_prefixes_give_way_to_whoever_needs_their_pages():
    store = make_store()
    publish(store, [1] * 12)
    publish(store, [2] * 12)
    assert store.pages.num_free == 0
    taken = store.take_pages(6)
    assert taken is not None and sorted(taken) == list(range(6))
    assert not list(store.tree.entries())


def test_nothing_is_evicted_for_a_demand_that_cannot_be_met():
    store = make_store()
    publish(store, [1] * 12)
    held = store.take_pages(2)
    assert store.take_pages(5) is None
    assert len(list(store.tree.entries())) == 1
    assert held is not None and store.pages.num_free == 1


def test_pages_in_use_are_passed_over():
    store = make_store()
    publish(store, [1] * 12)
    match = store.match([1] * 13, 12)
    assert match.num_tokens == 12
    assert store.take_pages(4) is None and not store.can_take(4)
    assert store.take_pages(3) is not None


def test_several_checkpoints_in_one_page_are_evicted_together():
    """A prompt's fork and its answer often end in the same page, which then has two holds."""
    store = make_store(num_pages=1)
    pages = store.take_pages(1)
    assert pages is not None
    publish(store, [1, 2], pages)
    publish(store, [1, 2, 3], pages)
    store.pages.release(pages)
    assert store.take_pages(1) == pages
    assert store.slots.num_free == 3


def test_a_slot_is_taken_from_the_oldest_checkpoint_that_nobody_reads():
    store = make_store()
    first, second, _ = (publish(store, [token] * 4) for token in range(3))
    store.match([0] * 5, 4)
    assert store.take_slot() == second.slot
    assert first in list(store.tree.entries())


def test_no_slot_is_found_while_all_are_in_use():
    store = make_store()
    assert len({store.take_slot() for _ in range(3)}) == 3
    assert store.take_slot() is None


def test_every_change_is_told_once():
    store, told = make_store(), []
    store.on_change = lambda entry, stored: told.append((entry.tokens, stored))
    publish(store, [1] * 4)
    publish(store, [1] * 4)
    assert told == [((1,) * 4, True)]
    store.take_pages(6)
    assert told[1:] == [((1,) * 4, False)]


def test_without_keeping_every_prompt_misses():
    store = make_store(keep_prefixes=False)
    publish(store, [1] * 4)
    assert store.match([1] * 5, 4).num_tokens == 0
    assert (store.pages.num_free, store.slots.num_free) == (6, 3)


@pytest.mark.parametrize(("prompt", "hit"), [([1] * 5, 4), ([2] * 5, 0)])
def test_hits_and_misses_are_counted(prompt, hit):
    store = make_store()
    publish(store, [1] * 4)
    store.count(store.match(prompt, 4), len(prompt))
    counters = store.counters
    assert (counters.queries, counters.query_tokens) == (1, 5)
    assert (counters.hits, counters.hit_tokens) == (int(hit > 0), hit)
    assert counters.misses.total() == int(hit == 0)

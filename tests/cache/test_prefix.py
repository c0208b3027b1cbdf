"""The prefix tree: a hit is whole and within its limit, and every miss has a reason."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.cache.pool import Pool
from k3jax.cache.prefix import Match, MissReason, PrefixEntry, PrefixTree

PAGE = 4


def make_tree(pages: int = 60, slots: int = 20) -> tuple[PrefixTree, Pool, Pool]:
    page_pool, slot_pool = Pool("pages", pages), Pool("slots", slots)
    return PrefixTree(page_pool, slot_pool, PAGE), page_pool, slot_pool


def insert(parts, tokens) -> PrefixEntry:
    """Publish `tokens` from fresh pages and a fresh slot that only the tree keeps."""
    tree, pages, slots = parts
    entry = PrefixEntry(
        tuple(tokens), tuple(pages.take() for _ in range(-(-len(tokens) // PAGE))), slots.take()
    )
    tree.insert(entry)
    pages.release(entry.pages)
    slots.release([entry.slot])
    return entry


def test_a_prompt_continues_from_its_longest_checkpoint():
    parts = make_tree()
    short, long = insert(parts, range(4)), insert(parts, range(8))
    match = parts[0].match([*range(8), 99, 99], 9)
    assert (match.num_tokens, match.slot, match.tail) == (8, long.slot, None)
    assert match.pages == (short.pages[0], long.pages[1])
    other = parts[0].match([*range(6), 99], 6)
    assert (other.num_tokens, other.slot, other.pages) == (4, short.slot, short.pages)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_a_match_never_exceeds_its_limit(length):
    parts = make_tree()
    insert(parts, range(length))
    tokens = [*range(length), 50]
    assert parts[0].match(tokens, length).num_tokens == length
    assert parts[0].match(tokens[:length], length - 1).num_tokens == 0


def test_a_checkpoint_inside_a_page_matches_only_its_own_tokens():
    parts = make_tree()
    entry = insert(parts, range(6))
    match = parts[0].match([*range(6), 9], 6)
    assert (match.num_tokens, match.pages, match.tail) == (6, entry.pages[:1], entry.pages[1])
    assert parts[0].match([0, 1, 2, 3, 4, 9, 9], 6).num_tokens == 0


def test_prefixes_that_part_inside_a_run_share_its_pages():
    parts = make_tree()
    first = insert(parts, range(12))
    second = insert(parts, [*range(8), 70, 71, 72, 73])
    parts[0].check()
    for entry in (first, second):
        match = parts[0].match([*entry.tokens, 99], 12)
        assert match.num_tokens == 12 and match.slot == entry.slot
        assert match.pages[:2] == first.pages[:2]
    assert parts[1].num_free == 60 - 4


def test_every_miss_names_its_reason():
    parts = make_tree()
    tree = parts[0]
    entry = insert(parts, range(8))
    assert tree.match([9] * 9, 8).reason is MissReason.NO_PREFIX
    assert tree.match([*range(4), *[9] * 5], 8) == Match(matched=4, reason=MissReason.NO_CHECKPOINT)
    tree.drop_checkpoint(entry)
    assert tree.match([*range(8), 9], 8).reason is MissReason.EVICTED
    tree.drop_pages()
    assert tree.match([*range(8), 9], 8).reason is MissReason.EVICTED
    assert tree.match([7] * 9, 8).reason is MissReason.NO_PREFIX


def test_a_lost_checkpoint_inside_a_page_counts_as_evicted():
    parts = make_tree()
    parts[0].drop_checkpoint(insert(parts, range(6)))
    assert parts[0].match([*range(6), 9], 6).reason is MissReason.EVICTED


def test_a_prefix_may_lose_its_checkpoint_and_keep_its_pages():
    parts = make_tree()
    entry = insert(parts, range(8))
    parts[0].drop_checkpoint(entry)
    assert parts[2].num_free == 20 and parts[1].num_free == 58
    assert parts[0].match([*range(8), 1], 8).matched == 8


def test_the_least_recently_used_goes_first():
    parts = make_tree()
    entries = [insert(parts, [token] * 8) for token in range(3)]
    parts[0].match([0] * 9, 8)
    assert parts[0].oldest_checkpoint() == entries[1]
    assert parts[0].oldest_pages() == [entries[1]]
    parts[0].drop_checkpoint(entries[2])
    assert parts[0].oldest_pages() == [], "pages without a checkpoint go before usable ones"


def test_what_a_sequence_holds_is_not_evicted():
    parts = make_tree()
    tree, pages, slots = parts
    held, free = insert(parts, [1] * 8), insert(parts, [2] * 8)
    pages.share(held.pages)
    slots.share([held.slot])
    assert tree.oldest_checkpoint() == free
    assert tree.oldest_pages() == [free]


def test_an_entry_needs_the_pages_of_its_tokens():
    parts = make_tree()
    with pytest.raises(ValueError, match="1 pages for 5 tokens at 4 a page"):
        parts[0].insert(PrefixEntry((1, 2, 3, 4, 5), (0,), 0))


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@given(kept=st.lists(prompts, max_size=8), asked=prompts, limit=st.integers(0, 14))
@settings(max_examples=200)
def test_a_match_is_what_a_list_of_all_prefixes_says(kept, asked, limit):
    parts = make_tree()
    slots = {}
    for tokens in kept:
        entry = insert(parts, tokens)
        slots.setdefault(entry.tokens, entry.slot)
        parts[0].check()
    fitting = [t for t in slots if len(t) <= limit and tuple(asked[: len(t)]) == t]
    best = max(fitting, key=len, default=())
    match = parts[0].match(asked, limit)
    assert match.num_tokens == len(best)
    assert match.slot == slots.get(best)
    assert len(match.pages) == len(best) // PAGE
    assert (match.tail is None) == (len(best) % PAGE == 0)
    assert (match.reason is None) == bool(best)


@given(kept=st.lists(prompts, max_size=8), moves=st.lists(st.booleans(), max_size=30))
@settings(max_examples=100)
def test_evicting_step_by_step_gives_everything_back(kept, moves):
    parts = make_tree()
    tree, pages, slots = parts
    for tokens in kept:
        insert(parts, tokens)
    choices = iter(moves)
    for _ in count():
        checkpoint = tree.oldest_checkpoint()
        if checkpoint is not None and next(choices, False):
            tree.drop_checkpoint(checkpoint)
        elif tree.oldest_pages() is not None:
            tree.drop_pages()
        else:
            break
        tree.check()
        held_pages, held_slots = tree.held()
        pages.check(held_pages)
        slots.check(held_slots)
    assert (pages.num_free, slots.num_free) == (60, 20)

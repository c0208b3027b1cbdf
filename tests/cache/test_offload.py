"""The host tier: bounded, least recently used first, and never wrong about what it holds."""

import random
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.cache.offload import COPIES_IN_FLIGHT, HostTier
from k3jax.cache.prefix import PrefixEntry
from k3jax.cache.store import PrefixStore
from k3jax.engine.prefix_copies import read_prefix, write_prefix
from k3jax.state import DecodeState
from k3jax.state.latent import page_bytes
from k3jax.state.recurrent import slot_bytes
from k3jax.state.transfer import PAGES_AT_ONCE, PrefixArrays, SlotCopy
from tests.helpers import tiny_config

SIZE = 4
SLOT_BYTES, PAGE_BYTES = 8 + 8, 8


@dataclass
class FakeDevice:
    """Two words of slot state and one per page, which say what tokens they were made from."""

    store: PrefixStore
    slots: np.ndarray = field(init=False)
    pages: np.ndarray = field(init=False)
    written: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.slots = np.zeros(self.store.slots.size, np.uint32)
        self.pages = np.zeros(self.store.pages.size, np.uint32)

    def tier(self, max_bytes: int = 1 << 20, least_tokens: int = 1) -> HostTier:
        tier = HostTier(
            max_bytes,
            self.store,
            read=self.read,
            write=self.write,
            slot_bytes=SLOT_BYTES,
            page_bytes=PAGE_BYTES,
            least_tokens=least_tokens,
        )
        self.store.offload = tier.offload
        return tier

    def read(self, slot, pages) -> PrefixArrays:
        chunks = []
        for at in range(0, len(pages), PAGES_AT_ONCE):
            values = self.pages[list(pages[at : at + PAGES_AT_ONCE])]
            values = np.pad(values, (0, PAGES_AT_ONCE - len(values)))
            chunks.append(jnp.asarray(np.repeat(values, 2).reshape(1, -1, 2, 1)))
        word = np.full((1, 2, 1, 1), self.slots[slot])
        return PrefixArrays(SlotCopy(jnp.asarray(word), jnp.asarray(word[..., 0])), tuple(chunks))

    def write(self, slot, pages, arrays, skip) -> None:
        values = np.concatenate([np.asarray(chunk)[0, :, 0, 0] for chunk in arrays.pages])
        assert len(values) == len(pages)
        self.pages[list(pages[skip:])] = values[skip:]
        self.slots[slot] = arrays.slot.matrices[0, 0, 0, 0]
        self.written = list(pages[skip:])

    def compute(self, tokens: tuple[int, ...]) -> bool:
        """Write and publish a prefix the way a sequence that ends does."""
        pages = self.store.take_pages(-(-len(tokens) // SIZE))
        if pages is None:
            return False
        slot = self.store.take_slot()
        if slot is None:
            self.store.pages.release(pages)
            return False
        for number, page in enumerate(pages):
            self.pages[page] = page_word(tokens[: (number + 1) * SIZE])
        self.slots[slot] = word(tokens)
        self.store.publish(PrefixEntry(tokens, tuple(pages), slot))
        self.store.pages.release(pages)
        self.store.slots.release([slot])
        return True

    def poison(self) -> None:
        self.pages[list(self.store.pages.free_ids())] = 0xBAD
        self.slots[list(self.store.slots.free_ids())] = 0xBAD


def word(tokens) -> int:
    return hash(("slot", tuple(tokens))) & 0xFFFFFFFF


def page_word(tokens) -> int:
    return hash(("page", tuple(tokens))) & 0xFFFFFFFF


def make(num_pages=32, num_slots=8) -> FakeDevice:
    return FakeDevice(PrefixStore(num_pages=num_pages, num_slots=num_slots, page_size=SIZE))


def lose_everything(store: PrefixStore) -> None:
    store.pages.release(store.take_pages(store.pages.size))


def run(start: int, length: int) -> tuple[int, ...]:
    return tuple(range(start, start + length))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 64, 65, 97])
def test_a_lost_prefix_comes_back_whole(length):
    device = make()
    tier, tokens = device.tier(), run(0, length)
    device.compute(tokens)
    lose_everything(device.store)
    device.poison()
    assert device.store.match(tokens, length).num_tokens == 0
    assert tier.promote([*tokens, 999], length, 0)
    match = device.store.match(tokens, length)
    assert match.num_tokens == length
    assert device.slots[match.slot] == word(tokens)
    held = [*match.pages, *([] if match.tail is None else [match.tail])]
    assert [device.pages[page] for page in held] == [
        page_word(tokens[: at + SIZE]) for at in range(0, length, SIZE)
    ]
    tier.check()


def test_bytes_are_exact_and_the_least_recently_used_goes_first():
    device = make()
    tier = device.tier(max_bytes=3 * SLOT_BYTES + 6 * PAGE_BYTES)
    for start, length in ((0, 8), (100, 5), (200, 7)):
        device.compute(run(start, length))
        lose_everything(device.store)
    assert tier.nbytes == tier.max_bytes
    assert tier.promote([*run(0, 8), 9], 8, 0)
    device.compute(run(300, 3))
    lose_everything(device.store)
    assert [entry.tokens for entry in tier.entries()] == [run(200, 7), run(0, 8), run(300, 3)]
    assert tier.nbytes == 3 * SLOT_BYTES + 5 * PAGE_BYTES
    tier.collect()
    tier.check()


def test_a_prefix_is_copied_once():
    device = make()
    tier = device.tier()
    for _ in range(3):
        device.compute(run(0, 6))
        lose_everything(device.store)
    assert (len(tier), tier.counters.offloads) == (1, 1)


def test_short_and_oversized_prefixes_are_not_kept():
    device = make()
    tier = device.tier(max_bytes=SLOT_BYTES + 2 * PAGE_BYTES, least_tokens=5)
    for length in (4, 9):
        device.compute(run(10 * length, length))
    lose_everything(device.store)
    assert (len(tier), tier.nbytes) == (0, 0)
    device.compute(run(500, 5))
    lose_everything(device.store)
    assert len(tier) == 1


def test_few_copies_are_in_flight():
    device = make()
    tier = device.tier()
    for start in range(0, 700, 100):
        device.compute(run(start, 6))
    lose_everything(device.store)
    waiting = [e for e in tier.entries() if isinstance(e.arrays.slot.matrices, jax.Array)]
    assert len(tier) == 7 and len(waiting) <= COPIES_IN_FLIGHT
    tier.collect()
    assert all(isinstance(e.arrays.slot.matrices, np.ndarray) for e in tier.entries())


def test_the_longest_prefix_within_the_limit_comes_back():
    device = make()
    tier = device.tier()
    for length in (5, 9, 13):
        device.compute(run(0, length))
    device.compute((0, 1, 77, 3, 4, 5, 6, 7, 8, 9, 10))
    lose_everything(device.store)
    assert tier.promote(run(0, 14), 12, 0)
    assert [entry.tokens for entry in device.store.tree.entries()] == [run(0, 9)]


def test_a_prefix_that_gains_too_little_stays_on_the_host():
    device = make()
    tier = device.tier(least_tokens=4)
    device.compute(run(0, 9))
    lose_everything(device.store)
    assert not tier.promote(run(0, 12), 11, 6)
    assert tier.promote(run(0, 12), 11, 5)


def test_pages_that_the_tree_still_has_are_not_written_again():
    device = make(num_slots=2)
    tier, tokens = device.tier(), run(0, 10)
    device.compute(tokens)
    taken = [device.store.take_slot(), device.store.take_slot()]
    device.store.slots.release(taken)
    assert device.store.tree.known_pages(tokens)
    assert tier.promote([*tokens, 11], 10, 0)
    assert len(device.written) == 1  # the partly filled page, which went with its checkpoint


@pytest.mark.parametrize("pages, slots", [(28, 6), (0, 7), (32, 0)])
def test_full_pools_leave_everything_as_it_was(pages, slots):
    device = make()
    tier, tokens = device.tier(), run(0, 21)
    device.compute(tokens)
    lose_everything(device.store)
    device.store.take_pages(pages)
    for _ in range(slots):
        device.store.take_slot()
    before = (device.store.pages.num_free, device.store.slots.num_free)
    fits = pages == 0 and slots < 7
    assert tier.promote([*tokens, 1], 21, 0) == fits
    assert (device.store.pages.num_free, device.store.slots.num_free) == before


def test_no_room_on_the_host_for_what_gives_way_does_not_spoil_what_comes_back():
    device = make(num_pages=4, num_slots=2)
    tier = device.tier(max_bytes=SLOT_BYTES + 3 * PAGE_BYTES)
    device.compute(run(0, 9))
    lose_everything(device.store)
    device.compute(run(100, 12))
    assert tier.promote([*run(0, 9), 5], 9, 0)
    match = device.store.match(run(0, 9), 9)
    assert match.num_tokens == 9 and device.slots[match.slot] == word(run(0, 9))
    assert [entry.tokens for entry in tier.entries()] == [run(100, 12)]
    tier.check()


def test_clear_leaves_nothing():
    device = make()
    tier = device.tier()
    device.compute(run(0, 6))
    lose_everything(device.store)
    tier.clear()
    assert (len(tier), tier.nbytes, list(tier.entries())) == (0, 0, [])
    tier.check()
    assert not tier.promote(run(0, 9), 8, 0)


def test_wrong_settings_are_named():
    device = make()
    with pytest.raises(ValueError, match="max_bytes = -1"):
        device.tier(max_bytes=-1)
    with pytest.raises(ValueError, match="least_tokens = 0"):
        device.tier(least_tokens=0)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(3, 14),
    num_slots=st.integers(1, 5),
    host_entries=st.integers(0, 6),
)
def test_whatever_happens_a_match_is_what_was_computed(seed, num_pages, num_slots, host_entries):
    rng = random.Random(seed)
    device = make(num_pages, num_slots)
    tier = device.tier(max_bytes=host_entries * (SLOT_BYTES + 3 * PAGE_BYTES))
    store = device.store
    held_pages, held_slots = [], []
    for _ in range(40):
        tokens = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 4 * SIZE)))
        action = rng.randrange(6)
        if action <= 1:
            device.compute(tokens)
        elif action == 2 and (pages := store.take_pages(rng.randrange(1, num_pages + 1))):
            held_pages += pages
        elif action == 3 and (slot := store.take_slot()) is not None:
            held_slots.append(slot)
        elif action == 4:
            store.pages.release(held_pages)
            store.slots.release(held_slots)
            held_pages, held_slots = [], []
        else:
            limit = len(tokens) - 1
            match = store.match(tokens, limit)
            came = tier.promote(tokens, limit, match.num_tokens)
            release(store, match)
            again = store.match(tokens, limit)
            assert again.num_tokens > match.num_tokens if came else again == match
            check_contents(device, tokens, again)
            release(store, again)
        device.poison()
        tier.check()
        store.tree.check()
        pages, slots = store.tree.held()
        pages.update(held_pages)
        slots.update(held_slots)
        store.pages.check(pages)
        store.slots.check(slots)


def release(store, match) -> None:
    store.pages.release([*match.pages, *([] if match.tail is None else [match.tail])])
    store.slots.release([] if match.slot is None else [match.slot])


def check_contents(device, tokens, match) -> None:
    n = match.num_tokens
    if n == 0:
        return
    assert device.slots[match.slot] == word(tokens[:n])
    for number, page in enumerate(match.pages):
        assert device.pages[page] == page_word(tokens[: (number + 1) * SIZE])
    if match.tail is not None:
        assert device.pages[match.tail] == page_word(tokens[:n])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_pages", [1, 16, 17, 37])
def test_both_halves_return_bit_for_bit_and_nothing_else_changes(dtype, num_pages):
    state = noise(dtype)
    before = jax.tree.map(np.array, state)
    rng = np.random.default_rng(num_pages)
    old, new = rng.permutation(41)[:num_pages], rng.permutation(41)[:num_pages]
    copies = jax.tree.map(np.array, read_prefix(state, 3, old.tolist()))
    last = num_pages % PAGES_AT_ONCE or PAGES_AT_ONCE
    copies = copies.replace(pages=(*copies.pages[:-1], copies.pages[-1][:, :last]))
    skip = num_pages // 3
    after = jax.tree.map(np.asarray, write_prefix(state, 1, new.tolist(), copies, skip))
    for was, now in zip(leaves(before.recurrent), leaves(after.recurrent), strict=True):
        expected = was.copy()
        expected[1] = was[3]
        np.testing.assert_array_equal(now, expected)
    for was, now in zip(leaves(before.latent), leaves(after.latent), strict=True):
        expected = was.copy()
        expected[new[skip:]] = was[old[skip:]]
        np.testing.assert_array_equal(now, expected)
    assert sum(x.nbytes for x in jax.tree.leaves(copies)) == slot_bytes(
        tiny_config(), dtype
    ) + num_pages * page_bytes(tiny_config(), 8, dtype)


def noise(dtype) -> DecodeState:
    """Every bit pattern may occur, NaN with payload included."""
    rng = np.random.default_rng(0)
    state = DecodeState.init(tiny_config(), num_slots=5, num_pages=41, page_size=8, dtype=dtype)
    return jax.tree.map(
        lambda x: jnp.asarray(
            np.frombuffer(rng.bytes(x.nbytes), np.dtype(x.dtype)).reshape(x.shape)
        ),
        state,
    )


def leaves(tree) -> list[np.ndarray]:
    """The arrays' bits."""
    return [x.view(f"u{x.dtype.itemsize}") for x in jax.tree.leaves(tree)]

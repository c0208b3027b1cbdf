"""Cache events: a router's picture is exactly the prefixes that can be resumed."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2 as common

from k3jax.engine.engine import CacheChange
from serving.cache_events import HISTORY, MAX_UNSENT, CachePublisher, Subscription, chain

BLOCK = 4


def stored(*tokens: int) -> CacheChange:
    return CacheChange(tokens, stored=True)


def removed(*tokens: int) -> CacheChange:
    return CacheChange(tokens, stored=False)


class Router:
    """What a subscriber believes: the blocks announced, by hash, with their parents."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.sequence = 0

    def read(self, batch: common.KvEventBatch) -> None:
        assert batch.sequence_number >= self.sequence
        self.sequence = batch.sequence_number
        for event in batch.events:
            match event.WhichOneof("data"):
                case "cleared":
                    self.blocks.clear()
                case "removed":
                    for block_hash in event.removed.block_hashes:
                        del self.blocks[block_hash]
                case "stored":
                    parent = None
                    if event.stored.HasField("parent_block_hash"):
                        parent = event.stored.parent_block_hash
                        assert parent in self.blocks
                    for block in event.stored.blocks:
                        assert block.block_hash not in self.blocks
                        self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
                        parent = block.block_hash


def drain(subscription: Subscription, router: Router) -> None:
    async def read() -> None:
        while (batch := await subscription.next(0.001)) is not None:
            router.read(batch)

    asyncio.run(read())


def expected(prefixes: set[tuple[int, ...]]) -> set[int]:
    return {block_hash for tokens in prefixes for block_hash, _ in chain(tokens, BLOCK)}


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)


@given(st.lists(st.tuples(st.booleans(), TOKENS), max_size=30), st.integers(0, 30))
def test_routers_know_the_blocks_under_some_checkpoint(
    steps: list[tuple[bool, tuple[int, ...]]], join: int
):
    publisher, prefixes = CachePublisher(BLOCK), set()
    early, late = Router(), Router()
    first = publisher.subscribe()
    second = None
    for number, (store, tokens) in enumerate(steps):
        if number == join:
            second = publisher.subscribe()
        (prefixes.add if store else prefixes.discard)(tokens)
        publisher.apply([CacheChange(tokens, store)])
    second = second or publisher.subscribe()

    drain(first, early)
    drain(second, late)

    assert set(early.blocks) == set(late.blocks) == expected(prefixes)
    assert {length for length, _ in publisher.prefixes()} == {len(tokens) for tokens in prefixes}


def test_shared_beginning_is_announced_once_and_outlives_one_of_its_prefixes():
    publisher, router = CachePublisher(BLOCK), Router()
    subscription = publisher.subscribe()
    a, b = (*range(8), 1, 1, 1, 1), (*range(8), 2, 2, 2, 2)

    publisher.apply([stored(*a), stored(*b), removed(*a)])
    drain(subscription, router)

    assert set(router.blocks) == expected({b})


def test_blocks_of_images_are_not_announced():
    publisher, router = CachePublisher(BLOCK), Router()
    subscription = publisher.subscribe()

    publisher.apply([stored(1, 2, 3, 4, 5, -77, -78, 6, 7, 8, 9, 10)])
    drain(subscription, router)

    assert [tokens for _, tokens in router.blocks.values()] == [(1, 2, 3, 4)]


def test_returning_subscriber_gets_what_it_missed():
    publisher, router = CachePublisher(BLOCK), Router()
    first = publisher.subscribe()
    publisher.apply([stored(*range(4))])
    drain(first, router)
    first.close()
    publisher.apply([stored(*range(8))])
    publisher.apply([stored(*range(12))])

    drain(publisher.subscribe(router.sequence), router)

    assert router.sequence == 3
    assert set(router.blocks) == expected({tuple(range(12))})


def test_subscriber_from_too_long_ago_starts_afresh():
    publisher, router = CachePublisher(BLOCK), Router()
    for number in range(HISTORY + 5):
        publisher.apply([stored(number, 0, 0, 0)])

    subscription = publisher.subscribe(2)
    drain(subscription, router)

    assert len(router.blocks) == HISTORY + 5
    assert router.sequence == publisher.sequence


def test_subscriber_that_lags_is_told_to_go():
    publisher = CachePublisher(BLOCK)
    subscription = publisher.subscribe()

    for number in range(MAX_UNSENT + 2):
        publisher.apply([stored(number, 0, 0, 0)])

    assert subscription.lagged


def test_prefix_shorter_than_a_block_is_known_but_not_announced():
    publisher = CachePublisher(BLOCK)

    publisher.apply([stored(1, 2, 3)])

    assert publisher.prefixes() == [(3, 0)]
    assert publisher.sequence == 0

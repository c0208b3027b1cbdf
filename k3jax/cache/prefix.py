"""The prefix tree: which runs of tokens have latent pages, and where the recurrent state was kept.

A prefix can be continued after n tokens only from both halves: the pages of tokens 0..n-1 and the
recurrent state (slot) after them. So a hit is always a whole `Match`, at a place where a
checkpoint was taken, and never only the pages. Nodes hold runs of whole pages. A checkpoint stands
at the end of a node, or in a *tail*: a few more tokens that fill only part of a last page, which a
hit copies before it writes on.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from k3jax.cache.pool import Pool

Tokens = Sequence[int]
_REMEMBERED = 4096
"""Evicted prefixes that a later miss can be blamed on."""


class MissReason(StrEnum):
    """Why a prompt could not continue from the cache."""

    NO_PREFIX = "no_prefix"
    """Its first page of tokens has not been seen."""
    NO_CHECKPOINT = "no_checkpoint"
    """Pages match, but no checkpoint lies within the match."""
    EVICTED = "evicted"
    """A checkpoint or page that would have matched has been evicted."""


@dataclass(frozen=True)
class Match:
    """Where a prompt can continue, and how far its tokens are known.

    `num_tokens` is 0 for a miss. `pages` are the full pages, `tail` the page of which only the
    first `num_tokens % page_size` positions count. `matched` is the number of tokens, in whole
    pages, that the tree knows, `reason` why nothing could be used.
    """

    num_tokens: int = 0
    pages: tuple[int, ...] = ()
    tail: int | None = None
    slot: int | None = None
    matched: int = 0
    reason: MissReason | None = None


@dataclass(eq=False)
class _Tail:
    """A checkpoint inside a page: `tokens` follow `node`, `page` holds their latents."""

    node: _Node
    tokens: tuple[int, ...]
    page: int
    slot: int


@dataclass(eq=False)
class _Node:
    """A run of whole pages after its parent, perhaps with a checkpoint at its end."""

    parent: _Node | None
    run: tuple[int, ...]
    pages: tuple[int, ...]
    start: int
    """Tokens before the run."""
    digest: int
    """Identifies the tokens up to the end of the run."""
    slot: int | None = None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    tails: list[_Tail] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Tokens up to the end of the run."""
        return self.start + len(self.run)


@dataclass(frozen=True)
class PrefixEntry:
    """A whole resumable prefix: tokens, their pages in order, the slot with the state after."""

    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    slot: int

    @property
    def num_tokens(self) -> int:
        """Tokens that both halves stand for."""
        return len(self.tokens)


@dataclass(frozen=True)
class TreeRun:
    """A node of the tree, to look at: its run of whole pages, and the checkpoints at its end."""

    depth: int
    """Runs before it."""
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    slot: int | None
    tails: tuple[tuple[int, int, int], ...]
    """Checkpoints a few tokens further: how many, the page that holds them, and the slot."""


class PrefixTree:
    """Token runs → pages and checkpoints. Holds one reference on everything it keeps."""

    def __init__(self, pages: Pool, slots: Pool, page_size: int):
        self._pages, self._slots = pages, slots
        self.page_size = page_size
        self._root = _Node(None, (), (), 0, 0)
        self._nodes: OrderedDict[_Node, None] = OrderedDict()
        self._checkpoints: OrderedDict[_Node | _Tail, None] = OrderedDict()
        self._evicted: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._page_counts: dict[int, int] = {}
        """References of the tree's own on each page, longest held first."""
        self.evictions = Counter[str]()

    def match(self, tokens: Tokens, limit: int) -> Match:
        """The longest usable prefix of `tokens` of at most `limit` tokens; marks it as used."""
        path, matched = self._walk(tokens)
        best: _Node | _Tail | None = None
        length, lost = 0, self._is_evicted(tokens, path, matched)
        for node in path:
            lost = lost or (node.slot is None and node.digest in self._evicted)
            if node.slot is not None and length < node.end <= limit:
                best, length = node, node.end
            for tail in node.tails:
                stop = node.end + len(tail.tokens)
                if length < stop <= limit and tuple(tokens[node.end : stop]) == tail.tokens:
                    best, length = tail, stop
        if best is None:
            if lost:
                reason = MissReason.EVICTED
            else:
                reason = MissReason.NO_CHECKPOINT if matched else MissReason.NO_PREFIX
            return Match(matched=matched, reason=reason)
        node = best.node if isinstance(best, _Tail) else best
        self._touch(node)
        self._checkpoints.move_to_end(best)
        pages = tuple(page for part in self._path(node) for page in part.pages)
        tail_page = best.page if isinstance(best, _Tail) else None
        return Match(length, pages, tail_page, best.slot, max(matched, node.end))

    def known_pages(self, tokens: Tokens) -> tuple[int, ...]:
        """The whole pages that the tree has for the beginning of `tokens`, usable or not."""
        path, matched = self._walk(tokens)
        node = path[-1]
        pages = [page for part in path for page in part.pages]
        if matched > node.end:
            child = node.children[tuple(tokens[node.end : node.end + self.page_size])]
            pages += child.pages[: (matched - node.end) // self.page_size]
        return tuple(pages)

    def insert(self, entry: PrefixEntry) -> bool:
        """Keep a prefix whose pages and state have been written; True if its checkpoint is new.

        The tree takes its own references on what it did not have yet.
        """
        size = self.page_size
        whole = entry.num_tokens // size * size
        if len(entry.pages) != -(-entry.num_tokens // size) or not entry.tokens:
            raise ValueError(
                f"{len(entry.pages)} pages for {entry.num_tokens} tokens at {size} a page"
            )
        node = self._extend(entry.tokens[:whole], entry.pages)
        self._touch(node)
        if whole == entry.num_tokens:
            return self._set_checkpoint(node, entry.slot)
        rest = entry.tokens[whole:]
        for tail in node.tails:
            if tail.tokens == rest:
                self._checkpoints.move_to_end(tail)
                return False
        tail = _Tail(node, rest, entry.pages[-1], entry.slot)
        self._hold([tail.page])
        self._slots.share([tail.slot])
        node.tails.append(tail)
        self._checkpoints[tail] = None
        return True

    def oldest_checkpoint(self) -> PrefixEntry | None:
        """The least recently used prefix whose slot nobody else holds."""
        for holder in self._checkpoints:
            if self._slots.count(self._slot(holder)) == 1:
                return self._entry(holder)
        return None

    def drop_checkpoint(self, entry: PrefixEntry) -> None:
        """Give up the checkpoint of a prefix; full pages stay."""
        holder = next(h for h in self._checkpoints if self._slot(h) == entry.slot)
        self._drop(holder)
        self.evictions["checkpoint"] += 1

    def oldest_pages(self) -> list[PrefixEntry] | None:
        """The prefixes that go with the pages to evict next, or None if no page can be had.

        Pages at the ends of the tree go, those that no checkpoint makes usable first; pages that
        running sequences keep alive anyway are passed over.
        """
        victim = self._victim()
        return None if victim is None else [self._entry(h) for h in self._holders(victim)]

    def drop_pages(self) -> None:
        """Evict the pages that `oldest_pages` speaks of, with their checkpoints."""
        victim = self._victim()
        if victim is None:
            raise ValueError("no page can be evicted")
        for holder in self._holders(victim):
            self._drop(holder)
        if isinstance(victim, _Node):
            assert victim.parent is not None
            first = victim.run[: self.page_size]
            self._remember(hash((victim.parent.digest, first)), ())
            del victim.parent.children[first]
            del self._nodes[victim]
            self._give_back(victim.pages)
        self.evictions["pages"] += 1

    def clear(self) -> None:
        """Forget everything."""
        for holder in list(self._checkpoints):
            self._drop(holder)
        for node in self._nodes:
            self._give_back(node.pages)
        self._nodes.clear()
        self._evicted.clear()
        self._root.children.clear()

    def entries(self) -> Iterator[PrefixEntry]:
        """Every resumable prefix, least recently used first."""
        return (self._entry(holder) for holder in self._checkpoints)

    def runs(self) -> Iterator[TreeRun]:
        """Every node, each before those that continue it.

        Tails at the very beginning of prompts belong to a first run of no tokens.
        """
        stack = [(self._root, 0)]
        while stack:
            node, depth = stack.pop()
            tails = tuple((len(tail.tokens), tail.page, tail.slot) for tail in node.tails)
            if node.parent is not None or tails:
                yield TreeRun(depth, node.start, node.run, node.pages, node.slot, tails)
            below = depth + (node.parent is not None)
            stack += [(child, below) for child in reversed(node.children.values())]

    def only_here(self, enough: int) -> int:
        """Pages that nobody but the tree holds; counting stops at `enough`."""
        found = 0
        for page, count in self._page_counts.items():
            found += self._pages.count(page) == count
            if found >= enough:
                break
        return found

    def held(self) -> tuple[Counter[int], Counter[int]]:
        """References that the tree holds, on pages and on slots."""
        pages = Counter(page for node in self._nodes for page in node.pages)
        slots = Counter(self._slot(holder) for holder in self._checkpoints)
        pages.update(h.page for h in self._checkpoints if isinstance(h, _Tail))
        return pages, slots

    def check(self) -> None:
        """Raise AssertionError if the tree contradicts itself."""
        seen: set[_Node] = set()
        stack = [self._root]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert child.parent is node and child.start == node.end, "a child is misplaced"
                assert key == child.run[: self.page_size], "a child's key is not its first page"
                assert len(child.run) == len(child.pages) * self.page_size, "a run is not pages"
                assert child.run and child not in seen
                seen.add(child)
                stack.append(child)
            for tail in node.tails:
                assert tail.node is node and 0 < len(tail.tokens) < self.page_size
                assert tail in self._checkpoints
            assert (node.slot is not None) == (node in self._checkpoints)
        assert seen == set(self._nodes), "the list of nodes is not the tree"
        assert self.held()[0] == self._page_counts, "pages are counted wrongly"

    # Walking and growing

    def _walk(self, tokens: Tokens) -> tuple[list[_Node], int]:
        """Nodes that match wholly, from the root on, and the tokens matched in whole pages."""
        node, path = self._root, [self._root]
        while True:
            start, size = node.end, self.page_size
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                return path, start
            common = self._common_pages(child.run, tokens, start)
            if common < len(child.pages):
                return path, start + common * size
            node = child
            path.append(node)

    def _common_pages(self, run: tuple[int, ...], tokens: Tokens, start: int) -> int:
        if tuple(tokens[start : start + len(run)]) == run:
            return len(run) // self.page_size
        pages = 0
        for at in range(0, len(run), self.page_size):
            piece = run[at : at + self.page_size]
            if tuple(tokens[start + at : start + at + self.page_size]) != piece:
                break
            pages += 1
        return pages

    def _extend(self, tokens: tuple[int, ...], pages: Sequence[int]) -> _Node:
        """The node that ends with `tokens` (whole pages), splitting and growing as needed."""
        path, matched = self._walk(tokens)
        node = path[-1]
        if matched > node.end:
            child = node.children[tokens[node.end : node.end + self.page_size]]
            node = self._split(child, (matched - node.end) // self.page_size)
        if node.end == len(tokens):
            return node
        first, size = node.end // self.page_size, len(tokens) // self.page_size
        new = _Node(
            node,
            tokens[node.end :],
            tuple(pages[first:size]),
            node.end,
            self._chain(node.digest, tokens[node.end :]),
        )
        self._hold(new.pages)
        node.children[new.run[: self.page_size]] = new
        self._nodes[new] = None
        return new

    def _split(self, node: _Node, pages: int) -> _Node:
        """Cut `node` after `pages` pages; returns the new first part."""
        assert node.parent is not None
        cut = pages * self.page_size
        head = _Node(
            node.parent,
            node.run[:cut],
            node.pages[:pages],
            node.start,
            self._chain(node.parent.digest, node.run[:cut]),
        )
        node.parent.children[head.run[: self.page_size]] = head
        node.parent, node.run, node.pages = head, node.run[cut:], node.pages[pages:]
        node.start += cut
        head.children[node.run[: self.page_size]] = node
        self._nodes[head] = None
        self._nodes.move_to_end(head, last=False)
        return head

    def _set_checkpoint(self, node: _Node, slot: int) -> bool:
        if node.slot is not None:
            self._checkpoints.move_to_end(node)
            return False
        self._slots.share([slot])
        node.slot = slot
        self._checkpoints[node] = None
        return True

    def _hold(self, pages: Iterable[int]) -> None:
        pages = tuple(pages)
        self._pages.share(pages)
        for page in pages:
            self._page_counts[page] = self._page_counts.get(page, 0) + 1

    def _give_back(self, pages: Iterable[int]) -> None:
        pages = tuple(pages)
        self._pages.release(pages)
        for page in pages:
            self._page_counts[page] -= 1
            if not self._page_counts[page]:
                del self._page_counts[page]

    # Forgetting

    def _victim(self) -> _Node | _Tail | None:
        oldest: _Node | None = None
        last: _Node | None = None
        for node in self._nodes:
            if node.children:
                continue
            last = last or node
            pages = (*node.pages, *(tail.page for tail in node.tails))
            if any(self._pages.count(page) == 1 for page in pages):
                if node.slot is None and not node.tails:
                    return node
                oldest = oldest or node
        if oldest is not None:
            return oldest
        tails = (h for h in self._checkpoints if isinstance(h, _Tail))
        tail = next((tail for tail in tails if self._only_tails_hold(tail)), None)
        # A leaf of pages in use frees none of its own, but gives way to what lies before it.
        return tail or last

    def _only_tails_hold(self, tail: _Tail) -> bool:
        """Whether dropping tails frees the page: several may stand in one, at other tokens."""
        sharing = sum(other.page == tail.page for other in tail.node.tails)
        return self._pages.count(tail.page) == sharing

    def _holders(self, victim: _Node | _Tail) -> list[_Node | _Tail]:
        if isinstance(victim, _Tail):
            return [victim]
        return [*([victim] if victim.slot is not None else []), *victim.tails]

    def _drop(self, holder: _Node | _Tail) -> None:
        del self._checkpoints[holder]
        if isinstance(holder, _Tail):
            holder.node.tails.remove(holder)
            self._give_back([holder.page])
            self._slots.release([holder.slot])
            self._remember(hash((holder.node.digest, "tail")), holder.tokens)
        else:
            assert holder.slot is not None
            self._slots.release([holder.slot])
            holder.slot = None
            self._remember(holder.digest, ())

    def _remember(self, digest: int, tail: tuple[int, ...]) -> None:
        self._evicted[digest] = tail
        self._evicted.move_to_end(digest)
        while len(self._evicted) > _REMEMBERED:
            self._evicted.popitem(last=False)

    def _is_evicted(self, tokens: Tokens, path: list[_Node], matched: int) -> bool:
        """Whether what would follow the matched nodes was there once."""
        node = path[-1]
        rest = tuple(tokens[node.end : node.end + self.page_size])
        if matched == node.end and hash((node.digest, rest)) in self._evicted:
            return True
        tail = self._evicted.get(hash((node.digest, "tail")))
        return tail is not None and rest[: len(tail)] == tail

    # Small helpers

    def _touch(self, node: _Node) -> None:
        """Mark as used, parents last, so that leaves are always older than what they stand on."""
        for part in reversed(self._path(node)):
            if part.parent is not None:
                self._nodes.move_to_end(part)

    def _chain(self, digest: int, run: tuple[int, ...]) -> int:
        """Folds pages into a digest, so that it does not matter how a path is cut into nodes."""
        for at in range(0, len(run), self.page_size):
            digest = hash((digest, run[at : at + self.page_size]))
        return digest

    def _path(self, node: _Node) -> list[_Node]:
        path: list[_Node] = []
        at: _Node | None = node
        while at is not None:
            path.append(at)
            at = at.parent
        return path[::-1]

    def _slot(self, holder: _Node | _Tail) -> int:
        assert holder.slot is not None
        return holder.slot

    def _entry(self, holder: _Node | _Tail) -> PrefixEntry:
        node = holder.node if isinstance(holder, _Tail) else holder
        path = self._path(node)
        tokens = tuple(token for part in path for token in part.run)
        pages = tuple(page for part in path for page in part.pages)
        if isinstance(holder, _Tail):
            tokens, pages = tokens + holder.tokens, (*pages, holder.page)
        return PrefixEntry(tokens, pages, self._slot(holder))

"""The prefix cache: state of earlier requests, found again by what the model read. Plain Python, no tensors.

A radix tree over symbols (`placement.symbols`): two sequences share state only as far as the model read the same,
token by token and offset row by offset row. So a sequence-anchored offset parts domains from the first token, a
turn-anchored one lets all share what came before the turn, and a domain that is registered anew, whose rows have
another digest, can never meet the state of the old one. The idea of a radix tree over token ids is RadixAttention's
(Zheng et al. 2024, https://arxiv.org/abs/2312.07104).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from offset_runtime.backends.base import Backend, SequenceId
from offset_runtime.errors import KVCacheFullError, OutOfMemoryError
from offset_runtime.placement import Symbol, agreement
from offset_runtime.request import Reuse

_log = logging.getLogger(__name__)

T = TypeVar("T")

# What a backend raises where sequences that are open leave too little room for what it is asked.
NO_ROOM = (KVCacheFullError, OutOfMemoryError, MemoryError)

# For how many uses of the cache a session that asks nothing is believed to go on: its run may have been stopped.
_SESSION_LASTS = 256


@dataclass(eq=False, slots=True)
class _Node:
    """A point of the tree: what the model has read on the way to it, and the sequence that holds its state, if any."""

    parent: _Node | None
    edge: tuple[Symbol, ...]
    depth: int
    children: dict[Symbol, _Node] = field(default_factory=dict)
    sequence: SequenceId | None = None
    size_bytes: int = 0
    used: int = 0
    session: str = ""
    reader: str = ""

    def symbols(self) -> tuple[Symbol, ...]:
        """What the model has read on the way from the root."""
        edges = []
        node: _Node | None = self
        while node is not None:
            edges.append(node.edge)
            node = node.parent
        return tuple(symbol for edge in reversed(edges) for symbol in edge)

    def below(self) -> Iterator[_Node]:
        """This node and all below it."""
        # No recursion: a trunk that many entries branch off is as deep as they are many.
        found = [self]
        while found:
            node = found.pop()
            yield node
            found.extend(node.children.values())


@dataclass(frozen=True, slots=True)
class _Outlook:
    """In how many steps the readers of a session read again, as was said at a time of the cache's clock."""

    said: int
    upcoming: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A sequence of the cache, which stays the cache's, what the model read in it, and its state in bytes."""

    symbols: tuple[Symbol, ...]
    sequence: SequenceId
    bytes: int


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """What a cache holds, and what it did.

    `tokens`: what several entries begin with is counted once. `bytes`: each entry counted as if it shared nothing. Of
    `asked_tokens` prompt tokens since it was made, `hit_tokens` were not read again. `evictions`: entries that gave
    way to others or to a request.
    """

    entries: int
    tokens: int
    bytes: int
    hit_tokens: int
    asked_tokens: int
    evictions: int


class PrefixCache:
    """Sequences that ended, and copies of running ones, kept on `backend` for requests that begin as they did.

    `max_bytes`: state all entries may hold together, each counted as if it shared nothing; `max_entries`: most
    sequences, or None. Least recently used entries go first, but those of readers that are expected go after all
    others, the latest expected first (as in KVFlow, https://arxiv.org/abs/2507.07400). Not thread-safe: it belongs to
    the engine's thread.
    """

    def __init__(self, backend: Backend, *, max_bytes: int, max_entries: int | None = None) -> None:
        self._backend = backend
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._root = _Node(None, (), 0)
        self._entries: dict[SequenceId, _Node] = {}
        self._tokens = self._bytes = 0
        self._clock = self._oldest = 0
        self._outlooks: dict[str, _Outlook] = {}
        self._hit_tokens = self._asked_tokens = self._evictions = 0

    @property
    def figures(self) -> CacheFigures:
        """What the cache holds and did until now."""
        return CacheFigures(
            len(self._entries), self._tokens, self._bytes, self._hit_tokens, self._asked_tokens, self._evictions
        )

    def take(self, symbols: Sequence[Symbol], most: int) -> tuple[SequenceId, int] | None:
        """Open a sequence that holds the longest known beginning of `symbols`, of at most `most` of them.

        Returns the sequence, which is the caller's, and how many symbols it holds, or None where nothing is known.
        """
        self._asked_tokens += len(symbols)
        while True:
            node, matched = self._match(symbols)
            held = min(matched, most)
            entry = self._covering(node, held)
            if entry is None:
                return None
            held = min(held, entry.depth)
            self._touch(entry)
            try:
                sequence = self._copy(entry, held)
            except NO_ROOM:
                self._evict()
                continue
            except Exception:
                # The request can do without, and the next longest may still serve.
                _log.exception("a cached sequence could not be copied; it is dropped")
                self._drop(entry)
                continue
            self._hit_tokens += held
            return sequence, held

    def expect(self, reuse: Reuse) -> None:
        """Take in which readers of a session read next."""
        if not self.keeps_any:
            return
        self._outlooks = {
            session: outlook
            for session, outlook in self._outlooks.items()
            if session != reuse.session and self._clock - outlook.said < _SESSION_LASTS
        }
        if reuse.upcoming:
            self._outlooks[reuse.session] = _Outlook(self._clock, dict(reuse.upcoming))

    def known(self, symbols: Sequence[Symbol]) -> int:
        """How many of `symbols`, from the first on, `take` would find; nothing counts as used."""
        node, matched = self._match(symbols)
        entry = self._covering(node, matched)
        return 0 if entry is None else min(matched, entry.depth)

    def put_copy(self, symbols: Sequence[Symbol], sequence: SequenceId, reuse: Reuse | None = None) -> None:
        """Keep a copy of a sequence that begins with `symbols` and stays the caller's, where there is room for one."""
        if not self.keeps_any or self._touch_known(symbols, reuse):
            return
        try:
            if self._backend.sequence_bytes(sequence) > self._max_bytes:
                return
            if len(self._entries) >= self._entry_limit:
                self._evict()
            self.put(symbols, self._backend.fork(sequence, len(symbols)), reuse)
        except NO_ROOM as error:
            _log.debug("no copy of a running sequence is kept: %s", error)
        except Exception:
            # The request does not need it.
            _log.exception("a running sequence could not be copied")

    def put(self, symbols: Sequence[Symbol], sequence: SequenceId, reuse: Reuse | None = None) -> None:
        """Keep a sequence that holds `symbols`; it belongs to the cache from now on, which may free it at once.

        `reuse` says whose it is.
        """
        if self._touch_known(symbols, reuse):
            self._free(sequence)
            return
        try:
            size = self._backend.sequence_bytes(sequence) if symbols else 0
        except BaseException:
            self._free(sequence)
            raise
        if not symbols or size > self._max_bytes or self._max_entries == 0:
            self._free(sequence)
            return
        self._clock += 1
        _sign(self._keep(symbols, sequence, size, self._clock), reuse)
        while self._bytes > self._max_bytes or len(self._entries) > self._entry_limit:
            self._evict()

    def entries(self) -> list[CacheEntry]:
        """What the cache holds, most recently used first."""
        nodes = sorted(self._entries.values(), key=lambda node: node.used, reverse=True)
        return [
            CacheEntry(node.symbols(), node.sequence, node.size_bytes) for node in nodes if node.sequence is not None
        ]

    def holds(self, entry: CacheEntry) -> bool:
        """Whether the cache still holds what `entries` gave."""
        node = self._entries.get(entry.sequence)
        return node is not None and node.depth == len(entry.symbols) and node.symbols() == entry.symbols

    def fits(self, symbols: Sequence[Symbol], size_bytes: int) -> bool:
        """Whether state of `symbols` is new to the cache, and of a size that nothing need give way to."""
        room = self._bytes + size_bytes <= self._max_bytes and len(self._entries) + 1 <= self._entry_limit
        return bool(symbols) and room and self._holding(symbols) is None

    def put_oldest(self, symbols: Sequence[Symbol], sequence: SequenceId) -> bool:
        """Keep a sequence as the one used longest ago where it `fits`, else free it; returns whether it is kept."""
        size = self._backend.sequence_bytes(sequence)
        if not self.fits(symbols, size):
            self._free(sequence)
            return False
        self._oldest -= 1
        self._keep(symbols, sequence, size, self._oldest)
        return True

    def shrink(self, tokens: int) -> None:
        """Drop least recently used entries until those left hold at most `tokens` tokens, shared ones counted once.

        Two that read the same at the same time share nothing, and hold more; then `with_room` makes room.
        """
        while self._entries and self._tokens > tokens:
            self._evict()

    def with_room(self, call: Callable[[], T]) -> T:
        """What `call` returns; as long as it finds no room or memory, an entry is dropped and it is called again.

        Raises what `call` raises, once no entry is left.
        """
        while True:
            try:
                return call()
            except NO_ROOM:
                if not self._entries:
                    raise
            self._evict()

    def clear(self) -> None:
        """Drop everything."""
        for node in list(self._entries.values()):
            self._drop(node)

    @property
    def keeps_any(self) -> bool:
        """Whether it may hold anything at all."""
        return self._max_bytes > 0 and self._entry_limit > 0

    @property
    def _entry_limit(self) -> float:
        return float("inf") if self._max_entries is None else self._max_entries

    def _copy(self, entry: _Node, held: int) -> SequenceId:
        assert entry.sequence is not None
        return self._backend.fork(entry.sequence, held)

    def _match(self, symbols: Sequence[Symbol]) -> tuple[_Node, int]:
        """The node at or below the last symbol that agrees, and how many agree."""
        node, at = self._root, 0
        while at < len(symbols):
            child = node.children.get(symbols[at])
            if child is None:
                return node, at
            agreed = agreement(child.edge, symbols, at)
            at += agreed
            node = child
            if agreed < len(child.edge):
                return node, at
        return node, at

    def _covering(self, node: _Node, held: int) -> _Node | None:
        """The entry that serves the first `held` symbols on the way to `node` best: it holds them, or most of them."""
        if held <= 0:
            return None
        if self._backend.capabilities.truncate:
            # Every node but the root leads to an entry; of several, the last one used is likeliest to stay.
            found = (other for other in node.below() if other.sequence is not None)
            return max(found, key=lambda other: other.used, default=None)
        # State that cannot be cut back is of use only where all of it agrees.
        above: _Node | None = node
        while above is not None and (above.depth > held or above.sequence is None):
            above = above.parent
        return above

    def _grow(self, symbols: Sequence[Symbol]) -> _Node:
        """The node that `symbols` lead to, made where there is none."""
        node, at = self._root, 0
        while at < len(symbols):
            child = node.children.get(symbols[at])
            if child is None:
                leaf = _Node(node, tuple(symbols[at:]), len(symbols))
                node.children[symbols[at]] = leaf
                self._tokens += len(leaf.edge)
                return leaf
            agreed = agreement(child.edge, symbols, at)
            node = child if agreed == len(child.edge) else self._split(child, agreed)
            at += agreed
        return node

    def _split(self, node: _Node, agreed: int) -> _Node:
        """Part the edge to `node` after `agreed` symbols, and return the node between."""
        assert node.parent is not None
        between = _Node(node.parent, node.edge[:agreed], node.depth - len(node.edge) + agreed)
        node.parent.children[node.edge[0]] = between
        between.children[node.edge[agreed]] = node
        node.parent, node.edge = between, node.edge[agreed:]
        return between

    def _touch_known(self, symbols: Sequence[Symbol], reuse: Reuse | None) -> bool:
        """Whether an entry serves for all of `symbols`; it then counts as used, and as the reader's."""
        known = self._holding(symbols)
        if known is None:
            return False
        self._touch(known)
        _sign(known, reuse)
        return True

    def _holding(self, symbols: Sequence[Symbol]) -> _Node | None:
        """The entry that serves for all of `symbols`."""
        node, matched = self._match(symbols)
        known = self._covering(node, matched) if matched == len(symbols) else None
        return known if known is not None and known.depth >= matched else None

    def _touch(self, node: _Node) -> None:
        self._clock += 1
        node.used = self._clock

    def _keep(self, symbols: Sequence[Symbol], sequence: SequenceId, size: int, used: int) -> _Node:
        leaf = self._grow(symbols)
        leaf.sequence, leaf.size_bytes, leaf.used = sequence, size, used
        self._entries[sequence] = leaf
        self._bytes += size
        if self._backend.capabilities.truncate:
            # What a longer entry begins with can be cut out of it.
            self._drop_ancestors(leaf)
        return leaf

    def _drop_ancestors(self, leaf: _Node) -> None:
        node = leaf.parent
        while node is not None:
            parent = node.parent
            if node.sequence is not None:
                # It stands for them from now on.
                leaf.used = max(leaf.used, node.used)
                self._drop(node)
            node = parent

    def _evict(self) -> None:
        self._drop(min(self._entries.values(), key=self._worth))
        self._evictions += 1

    def _worth(self, entry: _Node) -> tuple[bool, int, int]:
        """What entries are ordered by, the first to go first: not expected, expected late, used long ago."""
        outlook = self._outlooks.get(entry.session)
        if outlook is None or self._clock - outlook.said >= _SESSION_LASTS:
            return False, 0, entry.used
        steps = outlook.upcoming.get(entry.reader)
        return steps is not None, -(steps or 0), entry.used

    def _drop(self, node: _Node) -> None:
        """Free an entry's sequence, and prune what then leads nowhere."""
        assert node.sequence is not None
        self._free(node.sequence)
        del self._entries[node.sequence]
        self._bytes -= node.size_bytes
        node.sequence = None
        while node.parent is not None and node.sequence is None and not node.children:
            del node.parent.children[node.edge[0]]
            self._tokens -= len(node.edge)
            node = node.parent

    def _free(self, sequence: SequenceId) -> None:
        try:
            self._backend.free(sequence)
        except Exception:
            # A request must not fail for what another one left.
            _log.exception("a cached sequence could not be freed")


def _sign(entry: _Node, reuse: Reuse | None) -> None:
    if reuse is not None:
        entry.session, entry.reader = reuse.session, reuse.reader

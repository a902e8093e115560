"""The tree of the prefix cache, against a plain list of entries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offset_runtime.backends.base import Chunk, SequenceId
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.cache import PrefixCache

# What the fake holds for a token.
TOKEN_BYTES = 64

TEXTS = st.lists(st.integers(1, 2), max_size=9)
OPERATIONS = st.lists(
    st.tuples(st.just("put"), TEXTS)
    | st.tuples(st.just("take"), TEXTS)
    | st.tuples(st.just("shrink"), st.lists(st.just(1), max_size=30)),
    max_size=40,
)


def opened(backend: FakeBackend, text: list[int]) -> SequenceId:
    sequence = backend.allocate()
    if text:
        backend.forward([Chunk(sequence, text)])
    return sequence


def agreed(one: list[int], other: list[int]) -> int:
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def longest(entries: list[list[int]], text: list[int], most: int, truncates: bool) -> int:
    if truncates:
        return max((min(agreed(entry, text), most) for entry in entries), default=0)
    return max((len(entry) for entry in entries if entry == text[: len(entry)] and len(entry) <= most), default=0)


@given(
    operations=OPERATIONS, max_tokens=st.integers(0, 40), max_entries=st.none() | st.integers(0, 4), cut=st.booleans()
)
def test_the_cache_finds_what_a_list_of_its_entries_finds(
    operations: list[tuple[str, list[int]]], max_tokens: int, max_entries: int | None, cut: bool
) -> None:
    backend = FakeBackend(truncate=cut)
    cache = PrefixCache(backend, max_bytes=max_tokens * TOKEN_BYTES, max_entries=max_entries)
    texts: dict[SequenceId, list[int]] = {}
    held: list[SequenceId] = []
    for name, text in operations:
        # What is still open and not the caller's is what the cache holds.
        entries = [texts[s] for s in backend._sequences if s not in held]
        if name == "put":
            sequence = opened(backend, text)
            texts[sequence] = text
            cache.put(text, sequence)
        elif name == "shrink":
            cache.shrink(len(text))
            assert cache.figures.tokens <= len(text)
        else:
            expected = longest(entries, text, max(0, len(text) - 1), cut)
            found = cache.take(text, len(text) - 1)
            assert (0 if found is None else found[1]) == expected
            if found is not None:
                held.append(found[0])
                assert backend.length(found[0]) == expected
                [rows] = backend.forward([Chunk(found[0], text[expected:])])
                [again] = backend.forward([Chunk(backend.allocate(), text)])
                assert (rows == again).all()
                backend.free(max(backend._sequences))
        figures = cache.figures
        assert figures.entries == backend.open_sequences - len(held)
        entries = [texts[s] for s in backend._sequences if s not in held]
        assert figures.tokens == len({tuple(entry[: at + 1]) for entry in entries for at in range(len(entry))})
        assert figures.bytes == sum(map(len, entries)) * TOKEN_BYTES <= max_tokens * TOKEN_BYTES
        assert max_entries is None or figures.entries <= max_entries
    cache.clear()
    assert backend.open_sequences == len(held)
    assert not cache._root.children


def test_the_least_recently_used_entry_goes_first() -> None:
    backend = FakeBackend()
    cache = PrefixCache(backend, max_bytes=10**6, max_entries=2)
    for text in ([1, 1, 1], [2, 2, 2]):
        cache.put(text, opened(backend, text))
    assert cache.take([1, 1, 1, 1], 3) is not None
    cache.put([3, 3, 3], opened(backend, [3, 3, 3]))
    assert cache.take([2, 2, 2, 2], 3) is None
    assert cache.take([1, 1, 1, 1], 3) is not None
    assert cache.figures.evictions == 1


def test_an_entry_larger_than_the_cache_drives_nothing_out() -> None:
    backend = FakeBackend()
    cache = PrefixCache(backend, max_bytes=4 * TOKEN_BYTES)
    cache.put([1, 1], opened(backend, [1, 1]))
    cache.put([2] * 5, opened(backend, [2] * 5))
    assert (cache.figures.entries, cache.figures.tokens, cache.figures.evictions) == (1, 2, 0)


def test_a_longer_entry_replaces_those_it_begins_with() -> None:
    backend = FakeBackend()
    cache = PrefixCache(backend, max_bytes=10**6)
    for text in ([1], [1, 2], [1, 2, 3], [1, 2]):
        cache.put(text, opened(backend, text))
    assert (cache.figures.entries, cache.figures.tokens, backend.open_sequences) == (1, 3, 1)


def test_state_that_cannot_be_cut_keeps_the_shorter_entries_too() -> None:
    backend = FakeBackend(truncate=False)
    cache = PrefixCache(backend, max_bytes=10**6)
    for text in ([1, 2], [1, 2, 3, 4, 5], [1, 2, 3]):
        cache.put(text, opened(backend, text))
    assert cache.figures.entries == 3
    found = cache.take([1, 2, 3, 4], 3)
    assert found is not None
    assert found[1] == 3


class LosesOne(FakeBackend):
    """Cannot copy the sequence `lost`."""

    lost: SequenceId = -1

    def fork(self, sequence: SequenceId, tokens: int | None = None) -> SequenceId:
        if sequence == self.lost:
            raise RuntimeError("the state is gone")
        return super().fork(sequence, tokens)


def test_an_entry_that_cannot_be_copied_is_dropped_and_told_of_and_the_others_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend = LosesOne()
    cache = PrefixCache(backend, max_bytes=10_000)
    other, short, backend.lost = (opened(backend, text) for text in ([9, 9], [1, 2, 5], [1, 2, 3, 4]))
    for text, sequence in (([9, 9], other), ([1, 2, 5], short), ([1, 2, 3, 4], backend.lost)):
        cache.put(text, sequence)
    taken = cache.take([1, 2, 3, 4, 5], 4)
    assert taken is not None
    assert taken[1] == 2
    assert (cache.figures.entries, cache.figures.evictions) == (2, 0)
    assert "could not be copied" in caplog.text


def test_no_room_for_a_copy_drops_the_least_recently_used() -> None:
    backend = FakeBackend(max_sequences=2)
    cache = PrefixCache(backend, max_bytes=10_000)
    for text in ([9, 9], [1, 2, 3]):
        cache.put(text, opened(backend, text))
    taken = cache.take([1, 2, 3, 4], 3)
    assert taken is not None
    assert taken[1] == 3
    assert (cache.figures.entries, cache.figures.evictions) == (1, 1)

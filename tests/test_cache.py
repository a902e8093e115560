"""The tree of the prefix cache, against a plain list of entries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offset_runtime.backends.base import Chunk, SequenceId
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.cache import PrefixCache
from offset_runtime.request import Reuse

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


def kept(cache: PrefixCache, texts: dict[str, list[int]]) -> set[str]:
    """Which of `texts` the cache still holds, by a look that counts as no use."""
    return {name for name, text in texts.items() if cache._match(text)[1] == len(text)}


def filled(names: str, *, room: int, outlooks: list[Reuse]) -> set[str]:
    """Put a text of each reader of `names` into a cache with room for `room`; return whose are left."""
    backend = FakeBackend()
    cache = PrefixCache(backend, max_bytes=10**6, max_entries=room)
    texts = {name: [index + 1] * 3 for index, name in enumerate(names)}
    for reuse in outlooks:
        cache.expect(reuse)
    for name, text in texts.items():
        cache.put(text, opened(backend, text), Reuse("run", name))
    return kept(cache, texts)


def test_without_an_outlook_the_least_recently_used_goes_first() -> None:
    assert filled("abcd", room=3, outlooks=[]) == set("bcd")


def test_those_nobody_expects_go_before_those_that_are_expected() -> None:
    assert filled("abcd", room=2, outlooks=[Reuse("run", "x", {"a": 1, "b": 2})]) == set("ab")


def test_of_those_expected_the_latest_goes_first() -> None:
    assert filled("abc", room=2, outlooks=[Reuse("run", "x", {"a": 1, "b": 3, "c": 2})]) == set("ac")


def test_a_later_outlook_of_a_session_replaces_the_earlier_and_other_sessions_are_left_alone() -> None:
    early, late = Reuse("run", "x", {"a": 1}), Reuse("run", "y", {"b": 1})
    assert filled("abc", room=1, outlooks=[early, Reuse("other", "x", {"c": 1}), late]) == {"b"}


def test_a_session_that_asks_nothing_any_more_loses_its_claim() -> None:
    backend = FakeBackend()
    cache = PrefixCache(backend, max_bytes=10**6, max_entries=3)
    texts = {"stopped": [9] * 3}
    cache.expect(Reuse("run", "x", {"stopped": 1}))
    cache.put(texts["stopped"], opened(backend, texts["stopped"]), Reuse("run", "stopped"))

    for use in range(400):
        text = [1, 1 + use % 5, 1 + use // 5 % 80]
        cache.put(text, opened(backend, text))
        if use == 100:
            assert kept(cache, texts) == {"stopped"}

    assert kept(cache, texts) == set()


def test_agents_that_take_turns_find_their_prompts_where_an_outlook_is_given_and_never_by_recency_alone() -> None:
    hits = {}
    for told in (False, True):
        backend = FakeBackend()
        cache = PrefixCache(backend, max_bytes=10**6, max_entries=3)
        agents = {name: [index + 1] * 6 for index, name in enumerate("abcd")}
        for turn in range(16):
            name = "abcd"[turn % 4]
            after = {"abcd"[(turn + step) % 4]: step for step in range(1, 5)}
            reuse = Reuse("run", name, after)
            if told:
                cache.expect(reuse)
            found = cache.take(agents[name], 5)
            sequence = opened(backend, agents[name]) if found is None else found[0]
            cache.put(agents[name][: backend.length(sequence)], sequence, reuse)
        hits[told] = cache.figures.hit_tokens
    assert hits[False] == 0
    assert hits[True] >= 6 * 5

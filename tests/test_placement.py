"""Where an offset's rows lie in a prompt, and what the model therefore reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offset_runtime import DomainOffset
from offset_runtime.backends.fake import HIDDEN_SIZE, FakeBackend
from offset_runtime.errors import PlacementError
from offset_runtime.placement import Placement, check_placements, place, symbols

MakeOffset = Callable[..., DomainOffset]

IDENTITY = FakeBackend().identity


def test_a_turn_anchor_ends_with_the_last_prompt_token(make_offset: MakeOffset) -> None:
    offset = make_offset(IDENTITY, positions=3, anchor="turn")
    assert place(offset, 10) == Placement(7, offset, 3)
    assert place(offset, 10).stop == 10
    assert place(offset, 3).index == 0


def test_a_turn_anchor_needs_a_prompt_as_long_as_the_offset(make_offset: MakeOffset) -> None:
    offset = make_offset(IDENTITY, domain="legal", positions=3, anchor="turn")
    with pytest.raises(PlacementError, match=r"'legal' covers the last 3 prompt tokens, but the prompt has 2"):
        place(offset, 2)


def test_a_sequence_anchor_starts_at_position_0_and_never_reaches_into_the_reply(make_offset: MakeOffset) -> None:
    offset = make_offset(IDENTITY, positions=3, anchor="sequence")
    assert place(offset, 10) == Placement(0, offset, 3)
    assert place(offset, 2) == Placement(0, offset, 2)


@pytest.mark.parametrize(
    ("index", "rows", "message"),
    [
        (-1, 3, "empty, negative or longer than its offset"),
        (0, 0, "empty, negative or longer than its offset"),
        (0, 4, "empty, negative or longer than its offset"),
        (8, 3, r"at 8\.\.11 reaches beyond the prompt of 10 tokens"),
        (3, 3, r"at 3\.\.6 overlaps the placement before it, which ends at 5"),
    ],
)
def test_placements_that_cannot_be_are_refused(make_offset: MakeOffset, index: int, rows: int, message: str) -> None:
    offset = make_offset(IDENTITY, domain="legal", positions=3)
    first = Placement(2, offset, 3)
    with pytest.raises(PlacementError, match=message):
        check_placements([Placement(index, offset, rows), first], 10, HIDDEN_SIZE)


def test_placements_may_touch_and_come_in_any_order(make_offset: MakeOffset) -> None:
    offset = make_offset(IDENTITY, positions=3)
    check_placements([Placement(5, offset, 3), Placement(2, offset, 3), Placement(8, offset, 2)], 10, HIDDEN_SIZE)
    check_placements([], 10, HIDDEN_SIZE)


def test_rows_of_another_size_are_refused(make_offset: MakeOffset) -> None:
    with pytest.raises(PlacementError, match="has rows of 16 numbers; the model reads 32"):
        check_placements([Placement(0, make_offset(IDENTITY), 3)], 10, 32)


def test_symbols_name_token_digest_and_row_under_a_placement(make_offset: MakeOffset) -> None:
    offset = make_offset(IDENTITY, positions=2)
    expected = [7, (8, offset.digest, 0), (9, offset.digest, 1), 7]
    assert symbols([7, 8, 9, 7], [Placement(1, offset, 2)]) == expected
    assert symbols([7, 8], []) == [7, 8]


@given(st.integers(4, 20), st.integers(0, 1), st.integers(1, 3))
def test_symbols_agree_up_to_where_two_offsets_part(
    make_offset: MakeOffset, tokens: int, seed: int, positions: int
) -> None:
    ids = list(range(tokens))
    left = symbols(ids, [place(make_offset(IDENTITY, seed=0, positions=positions), tokens)])
    right = symbols(ids, [place(make_offset(IDENTITY, seed=seed, positions=positions), tokens)])
    shared = tokens if seed == 0 else tokens - positions
    assert left[:shared] == right[:shared]
    assert all(a != b for a, b in zip(left[shared:], right[shared:], strict=True))

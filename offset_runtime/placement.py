"""Where offsets lie in a prompt, and what the model therefore reads at each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from offset_runtime.errors import PlacementError
from offset_runtime.offset import Anchor, DomainOffset

# A token id, or (token id, offset digest, row) under a placement.
Symbol = int | tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class Placement:
    """The first `rows` rows of `offset`, added to the prompt positions `index`, `index` + 1, ….

    `rows` is K, or less where a sequence-anchored offset meets a prompt shorter than K.
    """

    index: int
    offset: DomainOffset
    rows: int

    @property
    def stop(self) -> int:
        """The position after the last one that is touched."""
        return self.index + self.rows


def place(offset: DomainOffset, prompt_tokens: int) -> Placement:
    """Place an offset in a prompt of `prompt_tokens` tokens, as its anchor says.

    A sequence anchor starts at position 0; rows beyond a shorter prompt are not used, since an
    offset is added at prefill only. A turn anchor ends with the last prompt token.

    Raises `PlacementError` when a turn-anchored offset has more rows than the prompt has tokens.
    """
    if offset.anchor == "sequence":
        return Placement(0, offset, min(offset.positions, prompt_tokens))
    index = anchor_index(offset.anchor, offset.positions, prompt_tokens, domain=offset.domain)
    return Placement(index, offset, offset.positions)


def anchor_index(anchor: Anchor, positions: int, prompt_tokens: int, *, domain: str) -> int:
    """Return the position of an offset's first row in a prompt of `prompt_tokens` tokens.

    Raises `PlacementError` as `place` does; `domain` names the offset in the message.
    """
    index = 0 if anchor == "sequence" else prompt_tokens - positions
    if index < 0:
        raise PlacementError(
            f"the offset of domain {domain!r} covers the last {positions} prompt tokens, "
            f"but the prompt has {prompt_tokens}; use a longer prompt or an offset with fewer positions"
        )
    return index


def check_placements(placements: Sequence[Placement], prompt_tokens: int, hidden_size: int) -> None:
    """Raise `PlacementError` unless all placements lie inside the prompt, apart, and have d numbers a row."""
    end = 0
    for placement in sorted(placements, key=lambda p: p.index):
        where = f"placement of domain {placement.offset.domain!r} at {placement.index}..{placement.stop}"
        if placement.offset.hidden_size != hidden_size:
            raise PlacementError(
                f"{where} has rows of {placement.offset.hidden_size} numbers; the model reads {hidden_size}"
            )
        numbers: tuple[object, object] = (placement.index, placement.rows)
        if not all(isinstance(number, Integral) for number in numbers):
            raise PlacementError(f"{where} has an index or a number of rows that is no whole number")
        if placement.index < 0 or not 0 < placement.rows <= placement.offset.positions:
            raise PlacementError(f"{where} is empty, negative or longer than its offset")
        if placement.stop > prompt_tokens:
            raise PlacementError(f"{where} reaches beyond the prompt of {prompt_tokens} tokens")
        if placement.index < end:
            raise PlacementError(f"{where} overlaps the placement before it, which ends at {end}")
        end = placement.stop


def symbols(token_ids: Sequence[int], placements: Sequence[Placement]) -> list[Symbol]:
    """Return what the model reads at each position of `token_ids`.

    KV state may be shared by two sequences only as far as these agree.
    """
    result: list[Symbol] = list(token_ids)
    for placement in placements:
        for row in range(placement.rows):
            position = placement.index + row
            result[position] = (token_ids[position], placement.offset.digest, row)
    return result


def agreement(one: Sequence[Symbol], other: Sequence[Symbol], start: int = 0) -> int:
    """How many symbols of `one` agree with those of `other` from `start` on."""
    low, high = 0, min(len(one), len(other) - start)
    # Comparing halves compares in C what a loop would symbol by symbol.
    while low < high:
        middle = (low + high + 1) // 2
        if tuple(one[low:middle]) == tuple(other[start + low : start + middle]):
            low = middle
        else:
            high = middle - 1
    return low

"""The suite finds each way of breaking the contract, at the behaviour that names it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from offset_runtime.backends import conformance
from offset_runtime.backends.base import Chunk, SequenceId
from offset_runtime.backends.fake import FakeBackend, FakeTokenizer
from offset_runtime.placement import Placement

Logits = list[npt.NDArray[np.float32]]


def moved(placement: Placement, by: int) -> Placement:
    return dataclasses.replace(placement, index=placement.index + by)


class AddsItAtEveryStep(FakeBackend):
    """The naive hook: every decode step reads row 0 of the sequence's offset again."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[SequenceId, Placement] = {}

    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        return super().forward([self._with_hook(chunk) for chunk in chunks])

    def _with_hook(self, chunk: Chunk) -> Chunk:
        for placement in chunk.placements:
            self.seen[chunk.sequence] = placement
        if len(chunk.token_ids) > 1 or chunk.sequence not in self.seen:
            return chunk
        again = dataclasses.replace(self.seen[chunk.sequence], index=self.length(chunk.sequence), rows=1)
        return dataclasses.replace(chunk, placements=[again])


class CountsFromTheChunk(FakeBackend):
    """Takes the index of a placement from the start of the chunk, not of the sequence."""

    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        return super().forward(
            [
                dataclasses.replace(c, placements=[moved(p, self.length(c.sequence)) for p in c.placements])
                for c in chunks
            ]
        )


class IsOneLate(FakeBackend):
    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        return super().forward([dataclasses.replace(c, placements=[moved(p, 1) for p in c.placements]) for c in chunks])


class IgnoresOffsets(FakeBackend):
    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        return super().forward([dataclasses.replace(c, placements=()) for c in chunks])


class AddsAllRows(FakeBackend):
    """Adds every row of an offset, also those that its placement leaves out."""

    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        return super().forward(
            [
                dataclasses.replace(
                    c, placements=[dataclasses.replace(p, rows=p.offset.positions) for p in c.placements]
                )
                for c in chunks
            ]
        )


class TakesOnlyTheFirstPlacement(FakeBackend):
    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        return super().forward([dataclasses.replace(c, placements=c.placements[:1]) for c in chunks])


class NudgesEveryOffset(FakeBackend):
    """Does not leave the logits alone under a zero offset."""

    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        found = super().forward(chunks)
        return [
            rows + np.float32(1e-5) if chunk.placements else rows for rows, chunk in zip(found, chunks, strict=True)
        ]


class MixesRows(FakeBackend):
    """Answers a batch in the order of its sequences' ids."""

    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        return super().forward(sorted(chunks, key=lambda chunk: chunk.sequence))


class SharesStateInForks(FakeBackend):
    def fork(self, sequence: SequenceId, tokens: int | None = None) -> SequenceId:
        return self._add(self._read(sequence))


class ForksOneTokenTooMany(FakeBackend):
    def fork(self, sequence: SequenceId, tokens: int | None = None) -> SequenceId:
        return super().fork(sequence, tokens + 1 if tokens in range(self.length(sequence)) else tokens)


class ForksAnyLength(FakeBackend):
    def fork(self, sequence: SequenceId, tokens: int | None = None) -> SequenceId:
        return self._add(list(self._read(sequence)[:tokens]))


class IgnoresTruncate(FakeBackend):
    def truncate(self, sequence: SequenceId, tokens: int) -> None:
        self._read(sequence)


class AcceptsAnyTruncate(FakeBackend):
    def truncate(self, sequence: SequenceId, tokens: int) -> None:
        del self._read(sequence)[max(tokens, 0) :]


class LacksTruncate(FakeBackend):
    def truncate(self, sequence: SequenceId, tokens: int) -> None:
        raise NotImplementedError


class HidesTruncate(FakeBackend):
    """Can cut a sequence back, but does not declare it."""

    def __init__(self) -> None:
        super().__init__(truncate=False)

    def truncate(self, sequence: SequenceId, tokens: int) -> None:
        del self._read(sequence)[tokens:]


class ForksUncutState(FakeBackend):
    """Cannot cut a sequence back, and yet forks a beginning of it."""

    def __init__(self) -> None:
        super().__init__(truncate=False)

    def fork(self, sequence: SequenceId, tokens: int | None = None) -> SequenceId:
        return self._add(self._read(sequence)[:tokens])


class KeepsFreedState(FakeBackend):
    def free(self, sequence: SequenceId) -> None:
        pass


class LosesTheLastToken(FakeBackend):
    def export_state(self, sequence: SequenceId) -> dict[str, npt.NDArray[Any]]:
        return {"read": super().export_state(sequence)["read"][: max(1, self.length(sequence) - 1)]}


class RestoresTheWrongState(FakeBackend):
    def import_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> SequenceId:
        if set(tensors) == {"read"}:
            tensors = {"read": np.roll(tensors["read"], 1, axis=0)}
        return super().import_state(tensors)


class SharesWhatItRestores(FakeBackend):
    """Gives every sequence restored from the same arrays the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.restored: dict[int, list[bytes]] = {}

    def import_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> SequenceId:
        sequence = super().import_state(tensors)
        self._sequences[sequence] = self.restored.setdefault(id(tensors), self._sequences[sequence])
        return sequence


class TakesAnyState(FakeBackend):
    def import_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> SequenceId:
        return self._add([row.tobytes() for array in tensors.values() for row in array])


class LeavesARefusedStateOpen(FakeBackend):
    def import_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> SequenceId:
        sequence = self._add([bytes(64)])
        restored = super().import_state(tensors)
        self.free(sequence)
        return restored


class ChangesItsKey(FakeBackend):
    def state_key(self) -> str:
        self._next_id += 1
        return f"{super().state_key()} {self._next_id}"


class HidesSaveState(FakeBackend):
    """Can save state, but does not declare it."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = dataclasses.replace(self.capabilities, save_state=False)


class HidesItsBytes(FakeBackend):
    def sequence_bytes(self, sequence: SequenceId) -> int:
        return len(self._read(sequence))

    def state_bytes(self) -> int:
        return 64 * sum(map(self.sequence_bytes, self._sequences))


class FeedsBeforeItChecks(FakeBackend):
    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        return [super(FeedsBeforeItChecks, self).forward([chunk])[0] for chunk in chunks]


class ReturnsEveryRow(FakeBackend):
    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        return super().forward([dataclasses.replace(c, logits="all") for c in chunks])


class MiscountsTokens(FakeBackend):
    def length(self, sequence: SequenceId) -> int:
        return super().length(sequence) // 2 * 2


class ForgetsAtEverySixthToken(FakeBackend):
    """Loses its state now and then, as a cache with a window that it does not declare would."""

    def forward(self, chunks: Sequence[Chunk]) -> Logits:
        for chunk in chunks:
            if len(chunk.token_ids) == 1 and self.length(chunk.sequence) % 6 == 0:
                del self._read(chunk.sequence)[:1]
        return super().forward(chunks)


class WritesAStartToken(FakeBackend):
    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = StartingTokenizer()


class StartingTokenizer(FakeTokenizer):
    bos_token_id: int | None = 256

    def encode(self, text: str) -> list[int]:
        return [256, *super().encode(text)]


@pytest.mark.parametrize(
    ("broken", "behaviour"),
    [
        (AddsItAtEveryStep, "offset is not added at decode"),
        (AddsItAtEveryStep, "chunks equal the whole"),
        (CountsFromTheChunk, "chunks equal the whole"),
        (CountsFromTheChunk, "mixed batch equals each alone"),
        (IsOneLate, "offset acts from its first position"),
        (IsOneLate, "anchors place the rows"),
        (IgnoresOffsets, "offset acts from its first position"),
        (AddsAllRows, "offset is its rows"),
        (AddsAllRows, "anchors place the rows"),
        (TakesOnlyTheFirstPlacement, "two placements in one prompt"),
        (NudgesEveryOffset, "zero offset changes nothing"),
        (MixesRows, "mixed batch equals each alone"),
        (SharesStateInForks, "fork is independent"),
        (SharesStateInForks, "forks decode in one batch"),
        (ForksOneTokenTooMany, "fork of a beginning equals cold"),
        (ForksAnyLength, "fork of a beginning equals cold"),
        (ForksUncutState, "fork of a beginning equals cold"),
        (IgnoresTruncate, "truncate then continue equals cold"),
        (AcceptsAnyTruncate, "truncate then continue equals cold"),
        (HidesTruncate, "truncate then continue equals cold"),
        (KeepsFreedState, "free forgets"),
        (LosesTheLastToken, "restored sequence continues as the original"),
        (RestoresTheWrongState, "restored sequence continues as the original"),
        (SharesWhatItRestores, "restored sequence continues as the original"),
        (TakesAnyState, "foreign state is refused"),
        (LeavesARefusedStateOpen, "foreign state is refused"),
        (ChangesItsKey, "foreign state is refused"),
        (HidesSaveState, "foreign state is refused"),
        (HidesSaveState, "restored sequence is like any other"),
        (HidesItsBytes, "free forgets"),
        (FeedsBeforeItChecks, "failed pass changes nothing"),
        (ReturnsEveryRow, "logits come as asked"),
        (MiscountsTokens, "length counts tokens"),
        (ForgetsAtEverySixthToken, "greedy cached equals full prefill"),
        (WritesAStartToken, "tokenizer adds nothing"),
    ],
)
def test_a_broken_backend_fails_at_the_behaviour_it_breaks(broken: type[FakeBackend], behaviour: str) -> None:
    with pytest.raises(conformance.ContractError, match=f"backend 'fake' breaks '{behaviour}': "):
        conformance.check(behaviour, broken)


def test_a_declared_capability_that_is_missing_fails() -> None:
    with pytest.raises(NotImplementedError):
        conformance.check("truncate then continue equals cold", LacksTruncate)


def test_an_undeclared_capability_that_is_refused_passes() -> None:
    conformance.check("truncate then continue equals cold", lambda: FakeBackend(truncate=False))


def test_behaviours_are_parted_into_required_ones_and_ones_by_capability() -> None:
    assert not conformance.REQUIRED & conformance.BY_CAPABILITY
    assert set(conformance.BEHAVIOURS) == conformance.REQUIRED | conformance.BY_CAPABILITY
    assert conformance.BY_CAPABILITY


def test_sequences_are_freed_even_when_a_behaviour_fails() -> None:
    backend = SharesStateInForks()
    with pytest.raises(conformance.ContractError):
        conformance.check("fork is independent", lambda: backend)
    assert backend.open_sequences == 0


def test_the_suite_needs_no_pytest() -> None:
    code = "import sys; from offset_runtime.backends import conformance; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

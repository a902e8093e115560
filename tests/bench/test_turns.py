"""The cases of the prefix cache: what they run, and what they say of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offset_runtime import EngineSettings, ModelSpec, OffsetRuntime
from offset_runtime.backends.base import Backend
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.bench import history, restoring, turns
from offset_runtime.bench.case import Case, LeftOutError, Setting
from offset_runtime.bench.cases import select
from offset_runtime.bench.history import HistorySizes, measure_shared_history
from offset_runtime.bench.pairs import MeasurementError, Ratio
from offset_runtime.bench.restoring import measure_restore_state
from offset_runtime.bench.turns import Dialogue, TurnSizes, measure_other_domains, measure_second_turn

TURNS = TurnSizes(cached_tokens=40, new_tokens=12, reply_tokens=4, other_domains=2)
HISTORY = HistorySizes(history_tokens=40, turn_tokens=10, agents=3)
MEASURES: dict[str, Callable[[Case, Setting, OffsetRuntime], Ratio]] = {
    "second_turn": lambda *given: measure_second_turn(TURNS, *given),
    "second_turn_other_domains": lambda *given: measure_other_domains(TURNS, *given),
    "shared_history": lambda *given: measure_shared_history(HISTORY, *given),
    "restore_state": lambda *given: measure_restore_state(52, *given),
}
NO_CACHE = EngineSettings(cache_bytes=0)


def measured(name: str, backend: Backend) -> Ratio:
    (found,) = select([name])
    runtime = OffsetRuntime(backend, settings=NO_CACHE)
    try:
        return MEASURES[name](found, Setting(ModelSpec(base="fake"), backend.name, 1), runtime)
    finally:
        runtime.engine.close()


@pytest.fixture
def tiny(
    make_model: Callable[..., Any], make_tokenizer: Callable[..., Any], one_thread: None
) -> Iterator[TorchBackend]:
    backend = TorchBackend(make_model("llama"), make_tokenizer())
    yield backend
    backend.close()


class Recording(FakeBackend):
    """A fake backend that keeps the tokens and the domains of each chunk of more than one token."""

    def __init__(self, **limits: int) -> None:
        super().__init__(**limits)
        self.read: list[tuple[int, tuple[str, ...]]] = []

    def forward(self, chunks):  # type: ignore[no-untyped-def]
        for chunk in chunks:
            if len(chunk.token_ids) > 1:
                domains = tuple(placement.offset.domain for placement in chunk.placements)
                self.read.append((len(chunk.token_ids), domains))
        return super().forward(chunks)


@pytest.mark.parametrize("name", MEASURES)
def test_a_case_of_the_cache_measures_on_a_real_architecture(name: str, tiny: TorchBackend) -> None:
    found = measured(name, tiny)
    (case,) = select([name])
    assert (found.name, found.goal, found.unit, found.breach) == (name, case.goal, "s", "")
    assert found.value == pytest.approx(found.a / found.b)
    assert tiny.state_bytes() == 0


def test_second_turn_reads_what_is_new_with_the_cache_and_everything_without() -> None:
    backend = Recording()
    measured("second_turn", backend)
    first, cached, whole = (37, ("bench-0",)), (12, ("bench-0",) * 2), (52, ("bench-0",) * 2)
    # The reply is found out; then a warm-up of both sides, and one round: A, its control, B.
    assert backend.read == [first, first, cached, whole, first, cached, first, cached, whole]
    assert backend.open_sequences == 0


def test_the_second_turn_goes_on_with_the_first_ones_reply_and_keeps_its_offset_in_place() -> None:
    dialogue = Dialogue(FakeBackend(), TURNS)
    turn = dialogue.turn()
    asked = dialogue.first.prompt_ids
    assert turn.prompt_ids[: len(asked)] == asked
    assert (len(asked), len(turn.prompt_ids)) == (37, 52)
    assert [(placement.index, placement.stop) for placement in turn.placements] == [(29, 37), (44, 52)]
    other = dialogue.turn(1)
    assert other.prompt_ids[:40] == turn.prompt_ids[:40]
    assert other.prompt_ids[40:] != turn.prompt_ids[40:]
    assert [placement.offset.domain for placement in other.placements] == ["bench-0", "bench-1"]


def test_other_domains_turns_come_between_the_first_turn_and_the_second_on_one_side_alone() -> None:
    backend = Recording()
    measured("second_turn_other_domains", backend)
    first, own = (37, ("bench-0",)), (12, ("bench-0", "bench-0"))
    others = [(12, ("bench-0", f"bench-{number}")) for number in (1, 2)]
    a, b = [first, *others, own], [first, own]
    assert backend.read == [first, *a, *b, *a, *a, *b]


def test_a_second_turn_whose_history_was_not_cached_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "CACHE", NO_CACHE)
    with pytest.raises(MeasurementError, match="0 tokens came from the prefix cache; expected 40"):
        measured("second_turn", FakeBackend())


def test_shared_history_is_read_once_with_turn_anchors_and_by_each_agent_with_sequence_anchors() -> None:
    backend = Recording()
    found = measured("shared_history", backend)
    turn = [(50, ("bench-0",)), (10, ("bench-1",)), (10, ("bench-2",))]
    sequence = [(50, (f"bench-{number}",)) for number in range(3)]
    assert backend.read == [*turn, *sequence, *turn, *turn, *sequence]
    assert backend.open_sequences == 0
    assert found.details == {"a_prefilled_tokens": 70, "b_prefilled_tokens": 150, "most_prefilled_tokens": 70}
    assert found.breach == ""
    assert "breach" not in found.as_json()


def test_more_prefilled_tokens_than_the_history_and_the_turns_are_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "CACHE", NO_CACHE)
    found = measured("shared_history", FakeBackend())
    assert found.breach == "150 tokens were prefilled with turn anchors; expected at most 70"
    assert found.as_json()["breach"] == found.breach
    assert found.as_json()["a_prefilled_tokens"] == 150


def test_restored_state_is_compared_with_reading_the_prompt_again_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    backend = Recording()
    found = measured("restore_state", backend)
    # To save it once; then side B of the warm-up and of the round. Side A reads one more token behind the state.
    assert backend.read == [(52, ("bench-0",))] * 3
    assert found.as_json()["file_bytes"] > backend.identity.hidden_size * 4 * 52
    assert found.as_json()["key_s"] > 0
    assert list(tmp_path.iterdir()) == []
    assert backend.open_sequences == 0


def test_state_that_is_not_found_again_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "CACHE", NO_CACHE)
    with pytest.raises(MeasurementError, match="0 tokens of restored state were found again; expected 52"):
        measured("restore_state", FakeBackend())


def test_state_that_cannot_be_saved_is_not_measured() -> None:
    backend = FakeBackend()
    backend.capabilities = replace(backend.capabilities, save_state=False)
    with pytest.raises(LeftOutError, match="needs state that can be saved"):
        measured("restore_state", backend)


@pytest.mark.parametrize("name", MEASURES)
@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"fork": False}, "needs a prefix cache; the state of this model cannot be kept"),
        ({"split_prefill": False}, "needs a prefix cache"),
        ({"max_sequences": 16}, "cached sequences beside 16 running ones; this model is loaded for 16 in all"),
        ({"context_tokens": 50}, "needs a context of 5. tokens; this model has 50"),
        ({"kv_capacity_tokens": 80}, "needs a KV cache of"),
    ],
)
def test_a_model_that_cannot_keep_what_a_case_needs_is_not_measured_at_another_thing(
    name: str, limits: dict[str, Any], reason: str
) -> None:
    backend = FakeBackend()
    backend.capabilities = replace(backend.capabilities, **limits)
    with pytest.raises(LeftOutError, match=reason):
        measured(name, backend)

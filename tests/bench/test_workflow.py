"""A whole workflow: what each variant runs, and how they are compared."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from offset_runtime.backends import fake
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.bench import child, workflow
from offset_runtime.bench.case import Setting
from offset_runtime.bench.cases import select
from offset_runtime.bench.pairs import MeasurementError, Ratio
from offset_runtime.bench.processes import ChildRun
from offset_runtime.bench.workflow import WorkflowSizes, find_variants, measure_workflow
from offset_runtime.models import ModelSpec, locate

SIZES = WorkflowSizes(agents=3, domains=2, rounds=2, transcript_tokens=20, instruction_tokens=10, reply_tokens=4)
TEXT = "The harbour lies at the mouth of the river, where the old road comes down to the sea."
WORK: dict[str, Any] = {"text": TEXT, "sizes": asdict(SIZES)}
FAKE = ModelSpec(base="fake").model_dump(mode="json")
FIGURES = {"seconds", "output_tokens", "state_bytes", "domain_bytes", "peak_rss_bytes"}


@pytest.fixture
def tiny_folder(tmp_path: Path, make_model: Callable[..., Any], make_tokenizer: Callable[..., Any]) -> Path:
    make_model("llama").save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, tuple[str, ...]]]]:
    """The prompts' chunks of each forward pass of the fake backend: tokens, and domains."""
    steps: list[list[tuple[int, tuple[str, ...]]]] = []

    class Recording(FakeBackend):
        def forward(self, chunks):  # type: ignore[no-untyped-def]
            prompts = [chunk for chunk in chunks if len(chunk.token_ids) > 1]
            if prompts:
                steps.append([(len(c.token_ids), tuple(p.offset.domain for p in c.placements)) for c in prompts])
            return super().forward(chunks)

    monkeypatch.setattr(fake, "FakeBackend", Recording)
    return steps


# What each variant runs


def test_ours_reads_what_is_new_to_all_once_and_then_the_instructions_of_the_others_in_one_batch(
    read: list[Any],
) -> None:
    figures = child.workflow_together(spec=FAKE, text=TEXT, sizes={**asdict(SIZES), "reply_tokens": 6})
    warm_up, *passes = [[tokens for tokens, _ in step] for step in read]
    # The first agent reads what is new to all and its own instructions, then the others theirs: of the last round
    # that is the three replies of six tokens. (The warm-up begins
    # as the transcript does.)
    assert warm_up == [10]
    assert [len(step) for step in passes] == [1, 2, 1, 2]
    assert (passes[0], passes[2]) == ([20 - 1 + 10], [18 + 10])
    assert all(tokens <= 10 for step in (passes[1], passes[3]) for tokens in step)
    assert figures["prefilled_tokens"] == sum(map(sum, passes))
    assert figures["output_tokens"] == 2 * 3 * 6
    assert figures["domain_bytes"] == 2 * 8 * fake.HIDDEN_SIZE * 4
    assert figures.keys() == FIGURES | {"prefilled_tokens"}


def test_without_cache_and_batch_each_call_reads_its_instructions_and_the_whole_transcript(read: list[Any]) -> None:
    figures = child.workflow_alone(spec=FAKE, **WORK)
    domains = [("bench-0",), ("bench-1",), ("bench-0",)]
    rounds = [[(tokens, domain)] for tokens in (30, 42) for domain in domains]
    # The longest prompt is read once more, for its bytes.
    assert read == [[(10, ("bench-0",))], *rounds, [(42, ())]]
    assert (figures["output_tokens"], figures["prefilled_tokens"]) == (24, 3 * 30 + 3 * 42)
    assert figures["state_bytes"] == 42 * fake.HIDDEN_SIZE * 4
    assert figures.keys() == FIGURES | {"prefilled_tokens"}


@pytest.mark.parametrize("rank", [0, 2])
def test_transformers_generates_the_same_number_of_tokens_with_adapters_and_without(
    rank: int, tiny_folder: Path, one_thread: None
) -> None:
    figures = child.workflow_transformers(source=str(tiny_folder), device="cpu", dtype=None, rank=rank, **WORK)
    assert figures.keys() == FIGURES
    assert figures["output_tokens"] == 24
    # Keys and values of two layers, two heads of eight numbers, of all tokens but the last reply's last.
    assert figures["state_bytes"] == 2 * 2 * 2 * 8 * 4 * (10 + 32 + 3)
    assert (figures["domain_bytes"] > 0) == bool(rank)


def test_no_reply_of_transformers_ends_with_an_end_token(
    tmp_path: Path, make_model: Callable[..., Any], make_tokenizer: Callable[..., Any], one_thread: None
) -> None:
    model = make_model("llama")
    # All logits are equal, so it would choose token 0, its end token.
    model.lm_head.weight.data.zero_()
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 0
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    figures = child.workflow_transformers(source=str(tmp_path), device="cpu", dtype=None, **WORK)
    assert figures["output_tokens"] == 24


def test_agents_have_their_own_instructions_and_the_transcript_grows_by_all_replies() -> None:
    work = child.Rounds(list(range(100, 200)), asdict(SIZES))
    asked: list[tuple[int, list[int]]] = []

    def reply(agent: int, ids: list[int]) -> list[int]:
        asked.append((agent, ids))
        return [agent] * 4

    figures = work.in_turn(reply)
    assert figures["output_tokens"] == 24
    first, second, third = work.instructions
    assert len({tuple(first), tuple(second), tuple(third)}) == 3
    transcript = list(range(100, 120))
    assert asked[0] == (0, work.other)
    assert asked[1:4] == [(agent, own + transcript) for agent, own in enumerate(work.instructions)]
    grown = [*transcript, *[0] * 4, *[1] * 4, *[2] * 4]
    assert asked[4:] == [(agent, own + grown) for agent, own in enumerate(work.instructions)]


@pytest.mark.real_model
def test_llama_generates_as_many_tokens_and_holds_the_state_of_its_last_call() -> None:
    options = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1}
    figures = child.workflow_llama(path=str(locate("smollm2-135m")), options=options, **WORK)
    assert figures.keys() == FIGURES
    assert figures["output_tokens"] == 24
    # 30 layers, three heads of 64 numbers of two bytes, keys and values, and little else.
    assert figures["state_bytes"] == pytest.approx(2 * 30 * 3 * 64 * 2 * (10 + 32 + 3), rel=0.01)


def test_the_peak_of_memory_stays_when_the_memory_is_given_back() -> None:
    before = child.peak_rss_bytes()
    held = bytearray(b"x") * int(before - psutil.Process().memory_info().rss + 64e6)
    peak = child.peak_rss_bytes()
    assert peak > before + 32e6
    del held
    # The system counts for each core apart, and the sum is off by a little.
    assert child.peak_rss_bytes() > peak - 1e6


# How they are compared


def pretended(seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch, **other: float) -> list[str]:
    """Let children take these seconds; the sides that ran, in their order."""
    ran: list[str] = []

    def run(side: str, given: dict[str, Any]) -> ChildRun:
        name = "adapters" if given.get("rank") else side
        ran.append(name)
        memory = {"state_bytes": 1e6, "domain_bytes": 2e6, "peak_rss_bytes": 3e8}
        tokens = {"output_tokens": other.get(name, 384.0)}
        return ChildRun({"seconds": seconds[name], **tokens, **memory}, 99.0)

    monkeypatch.setattr(workflow, "run_child", run)
    return ran


def measured(spec: ModelSpec, backend: str, pairs: int = 15) -> Ratio:
    (case,) = select(["workflow"])
    return measure_workflow(SIZES, case, Setting(spec, backend, pairs))


SECONDS = {
    "workflow_together": 2.0,
    "workflow_alone": 8.0,
    "workflow_llama": 10.0,
    "workflow_transformers": 10.0,
    "adapters": 16.0,
}


def test_all_variants_run_in_each_of_three_rounds_and_ours_twice(
    monkeypatch: pytest.MonkeyPatch, tiny_folder: Path
) -> None:
    ran = pretended(SECONDS, monkeypatch)
    found = measured(ModelSpec(base=str(tiny_folder)), "torch")
    assert (found.value, found.goal, found.within_goal, found.pairs) == (0.2, 0.4, True, 3)
    assert {name: ran.count(name) for name in ran} == {
        "workflow_together": 6,
        "workflow_alone": 3,
        "workflow_transformers": 3,
        "adapters": 3,
    }
    record = found.as_json()
    assert (record["ours_to_plain"], record["ours_to_adapters"]) == (0.25, 0.125)
    assert (record["ours_to_plain_low"], record["ours_to_plain_high"]) == (0.25, 0.25)
    assert (record["adapters_seconds"], record["calls_peak_rss_bytes"]) == (16.0, 3e8)
    assert "3 pairs of fresh processes" in found.note
    assert "adapters (LoRA adapters, switched for each call): 16 s, ours / it 0.125, state 1.0 MB" in found.note


def test_on_llama_cpp_the_other_side_is_llama_and_there_are_no_adapters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = pretended(SECONDS, monkeypatch)
    path = tmp_path / "m.gguf"
    path.touch()
    found = measured(ModelSpec(base=str(path)), "llama_cpp", pairs=1)
    assert set(ran) == {"workflow_together", "workflow_alone", "workflow_llama"}
    assert (found.value, found.pairs) == (0.2, 1)
    assert "ours_to_adapters" not in found.as_json()


def test_variants_that_did_unequal_work_are_not_compared(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    pretended(SECONDS, monkeypatch, workflow_alone=383.0)
    with pytest.raises(MeasurementError, match=r"the variants generated unequal numbers of tokens: .*'plain': 383"):
        measured(ModelSpec(base=str(tiny_folder)), "torch")


def test_without_peft_the_variant_with_adapters_is_left_out(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = find_variants(Setting(ModelSpec(base=str(tiny_folder)), "torch"), SIZES)
    assert found.keys() == {"ours", "plain", "calls"}


def test_every_side_that_is_asked_for_is_one_of_the_childs(tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    for base, backend in ((tiny_folder, "torch"), (path, "llama_cpp")):
        variants = find_variants(Setting(ModelSpec(base=str(base)), backend), SIZES)
        assert {variant.side for variant in variants.values()} <= child.SIDES.keys()

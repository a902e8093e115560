"""Every case that any backend can run, on the fake one or on a tiny model: what is measured, not how long it takes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp
import numpy as np
import pytest

from offset_runtime import OffsetRuntime
from offset_runtime.backends.base import Backend, Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.backends.llama_model import default_threads
from offset_runtime.backends.torch import TorchBackend
from offset_runtime.bench import batching, domain_costs, processes
from offset_runtime.bench.case import Case, LeftOutError, Setting
from offset_runtime.bench.cases import CASES, select
from offset_runtime.bench.pairs import MeasurementError, Ratio
from offset_runtime.bench.processes import ChildRun, run_child
from offset_runtime.bench.runner import BenchReport, LeftOut, run_cases
from offset_runtime.bench.workload import prompt
from offset_runtime.errors import GenerationError, InvalidRequestError
from offset_runtime.models import ModelSpec, locate

FAKE = ModelSpec(base="fake")
ON_ANY_BACKEND = ("prefill", "decode_step", "constrained_step", "eight_domains", "batch_8")


def case(name: str) -> Case:
    (found,) = select([name])
    return found


def measured_on_model(name: str, backend: Backend, spec: ModelSpec = FAKE, pairs: int = 1) -> Ratio:
    found = case(name)
    assert found.on_model is not None
    with OffsetRuntime(backend) as runtime:
        return found.on_model(found, Setting(spec, backend.name, pairs), runtime)


def measured_in_processes(name: str, spec: ModelSpec, pairs: int = 1) -> Ratio:
    found = case(name)
    assert found.in_processes is not None
    return found.in_processes(found, Setting(spec, "torch", pairs))


def run_on_fake(*names: str, backend: FakeBackend | None = None, pairs: int = 1) -> BenchReport:
    @contextmanager
    def load(spec: ModelSpec) -> Iterator[Backend]:
        yield backend or FakeBackend()

    setting = Setting(FAKE, "fake", pairs)
    return run_cases(select(names), setting, load=load, watch=lambda: nullcontext(lambda *at: None))


@pytest.fixture
def tiny(
    make_model: Callable[..., Any], make_tokenizer: Callable[..., Any], one_thread: None
) -> Iterator[TorchBackend]:
    backend = TorchBackend(make_model("llama", max_position_embeddings=512), make_tokenizer())
    yield backend
    backend.close()


@pytest.fixture
def tiny_folder(tmp_path: Path, make_model: Callable[..., Any], make_tokenizer: Callable[..., Any]) -> Path:
    make_model("llama", max_position_embeddings=512).save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


class Recording(FakeBackend):
    """A fake backend that keeps the domains of each forward pass, by sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[tuple[int, tuple[str, ...]]]] = []

    def forward(self, chunks):  # type: ignore[no-untyped-def]
        domains = [tuple(placement.offset.domain for placement in chunk.placements) for chunk in chunks]
        lengths = [len(chunk.token_ids) for chunk in chunks]
        self.steps.append(list(zip(lengths, domains, strict=True)))
        return super().forward(chunks)


# What each case measures


@pytest.mark.parametrize("name", ON_ANY_BACKEND)
def test_a_case_measures_on_a_real_architecture(name: str, tiny: TorchBackend) -> None:
    found = measured_on_model(name, tiny)
    assert found.name == name
    assert found.goal == case(name).goal
    assert found.value == pytest.approx(found.a / found.b)
    assert min(found.a, found.b) > 0


def test_prefill_alternates_256_fresh_tokens_with_and_without_an_offset_and_frees_them() -> None:
    backend = Recording()
    found = case("prefill")
    assert found.on_model is not None
    with OffsetRuntime(backend) as runtime:
        found.on_model(found, Setting(FAKE, "fake", 1), runtime)
        assert backend.open_sequences == 0
    # Warm-up of both sides, then one round: A, its control, B.
    with_offset, without = [(256, ("bench-0",))], [(256, ())]
    assert backend.steps == [with_offset, without, with_offset, with_offset, without]


def test_decode_step_compares_one_request_with_a_domain_to_a_plain_one() -> None:
    backend = Recording()
    measured_on_model("decode_step", backend)
    prompts = [domains for step in backend.steps for tokens, domains in step if tokens == 32]
    assert prompts == [("bench-0",), (), ("bench-0",), ("bench-0",), ()]


def test_constrained_step_compares_a_reply_under_a_schema_to_as_many_tokens_under_none() -> None:
    replies: list[list[int]] = []

    class Listening(FakeBackend):
        def forward(self, chunks):  # type: ignore[no-untyped-def]
            (chunk,) = chunks
            if len(chunk.token_ids) == 1:
                replies[-1].extend(chunk.token_ids)
            else:
                replies.append([])
            return super().forward(chunks)

    measured_on_model("constrained_step", Listening())
    assert [len(reply) for reply in replies] == [31] * 5
    held = [bytes(token for token in reply if token < 256).startswith(b'{"first_headline": "') for reply in replies]
    assert held == [True, False, True, True, False]


def test_eight_domains_compares_eight_domains_to_one_in_equal_batches() -> None:
    backend = Recording()
    found = measured_on_model("eight_domains", backend)
    prefills = [step for step in backend.steps if step[0][0] == 32]
    assert [len(step) for step in prefills] == [8] * 5
    assert [len({domains for _, domains in step}) for step in prefills] == [8, 1, 8, 8, 1]
    assert found.unit == "tokens_per_s"
    assert found.higher_is_better


def test_batch_8_compares_eight_at_once_to_one_after_the_other() -> None:
    backend = Recording()
    found = measured_on_model("batch_8", backend)
    prefills = [len(step) for step in backend.steps if step[0][0] == 32]
    assert prefills == [8, *[1] * 8, 8, 8, *[1] * 8]
    assert found.higher_is_better


@pytest.mark.parametrize(("name", "sequences"), [("own_loop_1", 1), ("own_loop_8", 8)])
def test_own_loop_gives_the_bare_loop_the_engines_own_prompts_and_tokens(
    name: str, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, bare = Recording(), []

    def bare_loop(found: Backend, prompts: Any, chosen: Any) -> float:
        assert found is backend
        bare.append(([len(ids) for ids in prompts], [len(tokens) for tokens in chosen]))
        return 1.0

    monkeypatch.setattr(batching, "bare_loop_s", bare_loop)
    found = measured_on_model(name, backend)
    assert bare == [([32] * sequences, [32] * sequences)] * 2
    assert found.b == pytest.approx(1 / 31)  # seconds a step, of which the first token needs none
    assert [len(step) for step in backend.steps if step[0][0] == 32] == [sequences] * 4


@pytest.mark.real_model
def test_the_bare_loop_decodes_every_token_behind_its_own_prompt() -> None:
    """Its last logits are those of the same tokens fed through the backend, for sequences of unequal length."""
    backend = LlamaCppBackend(locate("smollm2-135m"))
    try:
        ids = prompt(backend.tokenizer, 40)
        prompts = [ids[start : start + 4 + start] for start in range(3)]
        chosen = [ids[start + 20 : start + 23] for start in range(3)]
        first, _ = backend.allocate(), backend.allocate()
        backend.free(first)  # from here on our ids are not llama.cpp's
        fed = [backend.allocate() for _ in prompts]
        backend.forward([Chunk(at, tokens) for at, tokens in zip(fed, prompts, strict=True)])
        slots = [backend.slot(at) for at in fed]
        assert batching.bare_decode_s(backend.context, slots, [len(tokens) for tokens in prompts], chosen) > 0
        found = llama_cpp.llama_get_logits(backend.context)
        last = np.ctypeslib.as_array(found, (len(prompts), backend.identity.vocab_size)).copy()
        for row, (tokens, more) in enumerate(zip(prompts, chosen, strict=True)):
            (expected,) = backend.forward([Chunk(backend.allocate(), (*tokens, *more[:2]))])
            assert np.abs(last[row] - expected[-1]).max() < 0.5
            assert last[row].argmax() == expected[-1].argmax()
    finally:
        backend.close()


def test_domain_switch_compares_with_peft_on_the_same_weights_and_leaves_the_backend_as_it_was(
    tiny: TorchBackend, tiny_folder: Path
) -> None:
    before = [type(module) for module in tiny.model.modules()]
    found = case("domain_switch")
    assert found.on_model is not None
    runtime = OffsetRuntime(tiny)
    try:
        ratio = found.on_model(found, Setting(ModelSpec(base=str(tiny_folder)), "torch", 1), runtime)
        assert [type(module) for module in tiny.model.modules()] == before
        assert not any(parameter.requires_grad for parameter in tiny.model.parameters())
        assert not runtime.offsets
        assert tiny.length(tiny.allocate()) == 0  # still open
    finally:
        runtime.engine.close()
    assert "set_adapter" in ratio.note


def test_domain_switch_without_peft_says_what_to_install(tiny: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(LeftOutError, match=r"needs the package peft; run: pip install 'offset-runtime\[bench\]'"):
        measured_on_model("domain_switch", tiny)


def test_memory_compares_processes_with_100_domains_and_one() -> None:
    found = measured_in_processes("memory_100", FAKE)
    assert found.unit == "bytes"
    assert found.a > 1e7
    assert 0.9 < found.value < 1.1
    assert found.pairs == 1
    assert "1 pairs of fresh processes" in found.note


def test_a_cold_start_reports_the_load_time_of_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def pretended(side: str, given: dict[str, Any]) -> ChildRun:
        ours, warm_up = side == "ours", side not in dict(asked)
        asked.append((side, given))
        load_s = 1.0 if ours else 6.0
        return ChildRun({"load_s": 1e6 if warm_up else load_s, "first_token_s": 0.5}, 2.0 if ours else 8.0)

    monkeypatch.setattr(processes, "run_child", pretended)
    found = measured_in_processes("cold_start_transformers", ModelSpec(base="owner/name"), pairs=15)
    assert (found.value, found.goal, found.within_goal) == (0.25, None, None)
    assert found.pairs == processes.TRANSFORMERS_PAIRS
    assert found.as_json() | {"a_load_s": 1.0, "b_load_s": 6.0, "a_s": 2.0, "b_s": 8.0} == found.as_json()
    assert "converted" not in found.note
    assert "import and load: 1.00 s / 6.00 s" in found.note
    assert {side for side, _ in asked} == {"ours", "transformers"}
    assert dict(asked)["transformers"]["source"] == "owner/name"


def test_the_other_side_of_a_cold_start_reads_a_gguf_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, dict[str, Any]] = {}

    def pretended(side: str, given: dict[str, Any]) -> ChildRun:
        asked[side] = given
        return ChildRun({"load_s": 1.0, "first_token_s": 1.0}, 2.0)

    monkeypatch.setattr(processes, "run_child", pretended)
    path = tmp_path / "m.gguf"
    path.touch()
    found = measured_in_processes("cold_start_transformers", ModelSpec(base=str(path)))
    assert "transformers converts the GGUF each time" in found.note
    measured_in_processes("cold_start_llama", ModelSpec(base=str(path)))
    assert (asked["transformers"]["source"], asked["transformers"]["gguf_file"]) == (str(tmp_path), "m.gguf")
    assert asked["llama"]["path"] == str(path)
    options = asked["llama"]["options"]
    assert options["n_ctx"] == 8192
    assert options["n_threads"] == options["n_threads_batch"] == default_threads()


def test_llama_is_compared_with_on_gguf_files_only(tiny_folder: Path) -> None:
    with pytest.raises(LeftOutError, match=r"`Llama` runs .gguf files, and model .* is none"):
        measured_in_processes("cold_start_llama", ModelSpec(base=str(tiny_folder)))


def test_a_cold_process_of_ours_reports_load_and_first_token() -> None:
    check_cold(run_child("ours", {"spec": FAKE.model_dump(mode="json"), "text": "the law"}))


@pytest.mark.slow
def test_a_cold_process_of_transformers_reports_load_and_first_token(tiny_folder: Path) -> None:
    given = {"source": str(tiny_folder), "gguf_file": None, "device": "cpu", "text": "the law"}
    check_cold(run_child("transformers", given))


@pytest.mark.real_model
def test_a_cold_process_of_llama_reports_load_and_first_token() -> None:
    check_cold(run_child("llama", {"path": str(locate("smollm2-135m")), "text": "the law", "options": {}}))


def check_cold(found: ChildRun) -> None:
    assert min(found.figures["load_s"], found.figures["first_token_s"]) > 0
    assert found.seconds > found.figures["load_s"] + found.figures["first_token_s"]


def test_a_child_that_fails_is_reported_with_what_it_said_last() -> None:
    with pytest.raises(MeasurementError, match=r"process for side 'ours' failed: .*no model 'nowhere'"):
        run_child("ours", {"spec": ModelSpec(base="nowhere").model_dump(mode="json"), "text": "x"})


def test_a_child_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(MeasurementError, match=r"side 'ours' did not end within 0\.001 s and was stopped"):
        run_child("ours", {"spec": FAKE.model_dump(mode="json"), "text": "x"}, timeout_s=0.001)


# Running them


def test_a_case_is_measured_in_one_way() -> None:
    assert all((item.on_model is None) != (item.in_processes is None) for item in CASES)


def test_cases_are_selected_by_name_in_their_own_order() -> None:
    assert [item.name for item in select(["batch_8", "prefill"])] == ["prefill", "batch_8"]
    assert select([]) == CASES


def test_an_unknown_case_gets_the_nearest_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"no benchmark is called 'prefil'; .*did you mean 'prefill'\?"):
        select(["prefil"])


def test_the_report_holds_what_was_measured_and_why_the_rest_was_not() -> None:
    found = run_on_fake("own_loop_8", "prefill", "batch_8").as_json()
    assert found.keys() == {"model", "backend", "ratios", "left_out"}
    assert (found["model"], found["backend"]) == ("fake", "fake")
    assert [item["name"] for item in found["ratios"]] == ["prefill", "batch_8"]
    wanted = {"name", "value", "interval", "goal", "within_goal", "decided", "a_a", "pairs", "noise"}
    assert all(wanted <= item.keys() for item in found["ratios"])
    reason = "applies to backend llama_cpp; this model runs on fake"
    assert found["left_out"] == [{"name": "own_loop_8", "reason": reason, "failed": False}]


def test_a_model_that_cannot_do_one_case_is_measured_at_the_others() -> None:
    found = run_on_fake("prefill", "decode_step", backend=FakeBackend(context_tokens=200))
    assert [item.name for item in found.ratios] == ["decode_step"]
    (left_out,) = found.left_out
    assert left_out.reason == "needs a context of 256 tokens; this model has 200"
    assert found.failed == ()


class Failing(FakeBackend):
    """A fake backend that fails on prompts of 256 tokens."""

    def forward(self, chunks):  # type: ignore[no-untyped-def]
        if any(len(chunk.token_ids) == 256 for chunk in chunks):
            raise GenerationError("the model broke")
        return super().forward(chunks)


def test_a_case_that_goes_wrong_is_told_from_one_that_does_not_apply() -> None:
    found = run_on_fake("prefill", "decode_step", "own_loop_1", backend=Failing())
    assert [item.name for item in found.ratios] == ["decode_step"]
    assert found.failed == (LeftOut("prefill", "the model broke", failed=True),)
    assert [(item["name"], item["failed"]) for item in found.as_json()["left_out"]] == [
        ("prefill", True),
        ("own_loop_1", False),
    ]


def test_a_measurement_without_a_ratio_is_a_failed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domain_costs, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    found = run_on_fake("prefill")
    assert [(item.name, item.failed) for item in found.left_out] == [("prefill", True)]
    assert "expected a number greater than 0" in found.left_out[0].reason


def test_no_model_is_loaded_where_no_case_needs_it_here() -> None:
    def load(spec: ModelSpec) -> Any:
        raise AssertionError("loaded")

    setting = Setting(FAKE, "fake", 1)
    found = run_cases(select(["own_loop_1"]), setting, load=load, watch=lambda: nullcontext(lambda *at: None))
    assert [item.name for item in found.left_out] == ["own_loop_1"]


def test_only_a_goal_that_is_surely_missed_counts_as_missed() -> None:
    report = run_on_fake("prefill")
    (ratio,) = report.ratios
    miss = replace(ratio, value=9.0, interval=(8.0, 10.0), a_a=1.0)
    assert replace(report, results=(miss,)).missed == (miss,)
    assert replace(report, results=(replace(miss, a_a=1.5),)).missed == ()
    assert replace(report, results=(replace(miss, interval=(1.0, 10.0)),)).missed == ()
    assert replace(report, results=(replace(miss, goal=None),)).missed == ()


def test_the_benchmark_loads_torch_only_with_a_model_that_needs_it() -> None:
    # What a process has imported is part of the memory that it reports.
    code = "import sys, offset_runtime.bench.cases, offset_runtime.bench.runner; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

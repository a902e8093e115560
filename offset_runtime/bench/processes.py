"""Cases that are measured in processes of their own: memory, and how long a cold process takes to the first token."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from offset_runtime.bench import child
from offset_runtime.bench.case import Case, LeftOutError, Setting
from offset_runtime.bench.pairs import MeasurementError, Ratio, measure
from offset_runtime.bench.workload import SENTENCE
from offset_runtime.models import ModelSpec, locate

# A process takes seconds, and how much memory it holds hardly varies.
MEMORY_PAIRS = 3
LLAMA_PAIRS = 5
TRANSFORMERS_PAIRS = 3

DOMAINS = 100
# The slowest of these processes takes a minute or two, on a small machine and a large model.
CHILD_TIMEOUT_S = 600.0


def measure_memory(case: Case, setting: Setting) -> Ratio:
    """Resident bytes of a process that ran 100 requests, in 100 domains and in one."""

    def resident(domains: int) -> float:
        given = {"spec": plain_spec(setting.spec), "domains": domains, "requests": DOMAINS}
        return run_child("memory", given).figures["rss_bytes"]

    pairs = min(setting.pairs, MEMORY_PAIRS)
    ratio = measure(
        case.name,
        lambda: resident(DOMAINS),
        lambda: resident(1),
        goal=case.goal,
        unit="bytes",
        pairs=pairs,
        warm_up=False,
        progress=setting.progress,
    )
    return replace(ratio, note=f"{pairs} pairs of fresh processes, {DOMAINS} requests in each")


def measure_cold_llama(case: Case, setting: Setting) -> Ratio:
    """Seconds from the start of a process to the first token, beside llama-cpp-python's `Llama`."""
    path = gguf_path(setting.spec)
    if importlib.util.find_spec("llama_cpp") is None:
        raise LeftOutError("needs the package llama-cpp-python; run: pip install 'offset-runtime[llama-cpp]'")
    given = {"path": str(path), "text": SENTENCE, "options": llama_options(setting)}
    return _measure_cold(case, setting, "llama", given, LLAMA_PAIRS)


def measure_cold_transformers(case: Case, setting: Setting) -> Ratio:
    """Seconds from the start of a process to the first token, beside transformers."""
    source = locate(setting.spec.base)
    is_file = isinstance(source, Path) and source.is_file()
    given = {
        "source": str(Path(source).parent if is_file else source),
        "gguf_file": Path(source).name if is_file else None,
        "device": setting.spec.device,
        "text": SENTENCE,
    }
    ratio = _measure_cold(case, setting, "transformers", given, TRANSFORMERS_PAIRS)
    if is_file and setting.backend == "torch":
        copied = "ours reads the copy of the GGUF that was converted once, transformers converts the GGUF each time"
        ratio = replace(ratio, note=f"{ratio.note}; {copied}")
    return ratio


@dataclass(frozen=True, slots=True)
class ChildRun:
    """What a child process measured, and seconds from its start until it said so."""

    figures: Mapping[str, float]
    seconds: float


def run_child(side: str, given: Mapping[str, Any], timeout_s: float = CHILD_TIMEOUT_S) -> ChildRun:
    """Run one side of `bench.child` in a fresh process.

    Raises `MeasurementError` if it fails, with what it said last, or does not end within `timeout_s`.
    """
    command = [sys.executable, "-P", child.__file__, side, json.dumps(given)]
    package_root = str(Path(__file__).parents[2])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    # Not a pipe: what nobody reads would fill it and stop the child.
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        began = time.perf_counter()
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=environment) as process,
            _killed_after(process, timeout_s) as timed_out,
        ):
            assert process.stdout is not None
            found = next((line for line in process.stdout if line.startswith(child.MARK)), None)
            seconds = time.perf_counter() - began
            process.communicate()
        if timed_out.is_set():
            raise MeasurementError(f"the process for side {side!r} did not end within {timeout_s:g} s and was stopped")
        if found is None:
            said.seek(0)
            raise MeasurementError(f"the process for side {side!r} failed: {_last_line(said.read())}")
    return ChildRun(json.loads(found.removeprefix(child.MARK)), seconds)


@contextmanager
def _killed_after(process: subprocess.Popen[str], timeout_s: float) -> Iterator[threading.Event]:
    """Kill `process` after `timeout_s`, which sets the event that is yielded, or if the block raises."""
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        process.kill()

    timer = threading.Timer(timeout_s, stop)
    timer.start()
    try:
        yield timed_out
    except BaseException:
        process.kill()
        raise
    finally:
        timer.cancel()


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


@dataclass(slots=True)
class _Side:
    """Runs one side, and keeps the load time of each run."""

    side: str
    given: Mapping[str, Any]
    load_s: list[float] = field(default_factory=list)

    def __call__(self) -> float:
        run = run_child(self.side, self.given)
        self.load_s.append(run.figures["load_s"])
        return run.seconds


def _measure_cold(case: Case, setting: Setting, other: str, given: Mapping[str, Any], most_pairs: int) -> Ratio:
    a = _Side("ours", {"spec": plain_spec(setting.spec), "text": SENTENCE})
    b = _Side(other, given)
    pairs = min(setting.pairs, most_pairs)
    ratio = measure(case.name, a, b, goal=case.goal, pairs=pairs, progress=setting.progress)
    # The first run of each side was its warm-up.
    load_a, load_b = median(a.load_s[1:]), median(b.load_s[1:])
    note = (
        f"from the start of a process to its first token, {pairs} pairs; "
        f"of it, import and load: {load_a:.2f} s / {load_b:.2f} s"
    )
    return replace(ratio, details={"a_load_s": load_a, "b_load_s": load_b}, note=note)


def plain_spec(spec: ModelSpec) -> dict[str, Any]:
    """The specification as a child reads it."""
    return spec.model_dump(mode="json")


def gguf_path(spec: ModelSpec) -> Path:
    """The model's .gguf file. Raises `LeftOutError` where it is none."""
    source = locate(spec.base)
    if not (isinstance(source, Path) and source.is_file()):
        raise LeftOutError(f"`Llama` runs .gguf files, and model {spec.base!r} is none")
    return source


def llama_options(setting: Setting) -> dict[str, Any]:
    """What sizes and places the model, as the `llama_cpp` backend has it; `Llama` spells the options as we do."""
    from offset_runtime.backends.llama_model import DEFAULT_N_CTX, default_threads

    options = setting.spec.llama_cpp
    given = options.model_dump(include={"n_batch", "n_ubatch", "n_gpu_layers"})
    # Left out, `Llama` would take half of the logical cores for decode, and all of them for prefill.
    threads = options.n_threads or default_threads()
    return given | {
        "n_ctx": options.n_ctx or DEFAULT_N_CTX,
        "n_threads": threads,
        "n_threads_batch": options.n_threads_batch or threads,
    }

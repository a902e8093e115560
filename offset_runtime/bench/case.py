"""One case of the benchmark: what it is called, where it applies, and how it is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offset_runtime.bench.pairs import MIN_PAIRS, Progress, Ratio
from offset_runtime.models import ModelSpec
from offset_runtime.runtime import OffsetRuntime

BACKENDS = frozenset({"torch", "llama_cpp", "fake"})
REAL_BACKENDS = BACKENDS - {"fake"}


class LeftOutError(Exception):
    """A case that does not apply here; the message is the reason. Never reaches the user as an error."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a case is measured on.

    `spec`: how the model is loaded, for cases that do so in processes of their own. `pairs`: rounds of a timed case.
    """

    spec: ModelSpec
    backend: str
    pairs: int = MIN_PAIRS
    progress: Progress | None = None


OnModel = Callable[["Case", Setting, OffsetRuntime], Ratio]
InProcesses = Callable[["Case", Setting], Ratio]


@dataclass(frozen=True, slots=True)
class Case:
    """A ratio that users can measure.

    `what`: the ratio in words, A / B. `goal`: see `Ratio`. `on_model` measures on the loaded model, `in_processes`
    in processes that load it themselves; a case has one of the two. The latter run after the model was released,
    so that it is not in memory twice.
    """

    name: str
    what: str
    goal: float | None
    on_model: OnModel | None = None
    in_processes: InProcesses | None = None
    higher_is_better: bool = False
    backends: frozenset[str] = BACKENDS

    def check_backend(self, backend: str) -> None:
        """Raise `LeftOutError` unless the case applies to `backend`."""
        if backend not in self.backends:
            wanted = " or ".join(sorted(self.backends))
            raise LeftOutError(f"applies to backend {wanted}; this model runs on {backend}")

"""Running cases, and what came of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from offset_runtime.backends.base import Backend
from offset_runtime.bench.case import Case, LeftOutError, Setting
from offset_runtime.bench.pairs import MeasurementError, Ratio
from offset_runtime.bench.workload import NO_CACHE
from offset_runtime.errors import OffsetError
from offset_runtime.models import ModelSpec
from offset_runtime.runtime import OffsetRuntime

# update(name of the case, rounds done, rounds in all)
Update = Callable[[str, int, int], None]
Watch = Callable[[], AbstractContextManager[Update]]
Load = Callable[[ModelSpec], AbstractContextManager[Backend]]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A case that was not measured, and why. `failed`: it applies here, and went wrong."""

    name: str
    reason: str
    failed: bool = False


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What was measured, of which model, and what was not."""

    model: str
    backend: str
    cases: tuple[Case, ...]
    results: tuple[Ratio | LeftOut, ...]

    @property
    def ratios(self) -> tuple[Ratio, ...]:
        """The measured ratios, in the order of the cases."""
        return tuple(result for result in self.results if isinstance(result, Ratio))

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The cases that were not measured, in the order of the cases."""
        return tuple(result for result in self.results if isinstance(result, LeftOut))

    @property
    def missed(self) -> tuple[Ratio, ...]:
        """Ratios that surely miss their goal."""
        return tuple(ratio for ratio in self.ratios if ratio.within_goal is False and ratio.decided)

    @property
    def breached(self) -> tuple[Ratio, ...]:
        """Ratios beside which something was found that must not be, whatever the times are."""
        return tuple(ratio for ratio in self.ratios if ratio.breach)

    @property
    def failed(self) -> tuple[LeftOut, ...]:
        """The cases that went wrong."""
        return tuple(item for item in self.left_out if item.failed)

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "model": self.model,
            "backend": self.backend,
            "ratios": [ratio.as_json() for ratio in self.ratios],
            "left_out": [asdict(item) for item in self.left_out],
        }


def run_cases(cases: Sequence[Case], setting: Setting, *, load: Load, watch: Watch) -> BenchReport:
    """Measure `cases`: first those on the model, loaded once by `load`, then, after it is released, the others.

    A case that does not apply here, or fails, is left out with its reason. `watch` opens a display of progress; it is
    not open while the model loads. Raises what `load` raises.
    """
    found: dict[str, Ratio | LeftOut | None] = {case.name: _unfit(case, setting) for case in cases}
    on_model = [case for case in cases if case.on_model and found[case.name] is None]
    if on_model:
        with load(setting.spec) as backend, OffsetRuntime(backend, settings=NO_CACHE) as runtime, watch() as update:
            found |= dict(_measure_each(on_model, setting, update, runtime))
    with watch() as update:
        others = [case for case in cases if found[case.name] is None]
        found |= dict(_measure_each(others, setting, update, None))
    results = tuple(result for result in found.values() if result is not None)
    return BenchReport(setting.spec.base, setting.backend, tuple(cases), results)


def _unfit(case: Case, setting: Setting) -> LeftOut | None:
    try:
        case.check_backend(setting.backend)
    except LeftOutError as error:
        return LeftOut(case.name, str(error))
    return None


def _measure_each(
    cases: Sequence[Case], setting: Setting, update: Update, runtime: OffsetRuntime | None
) -> Iterator[tuple[str, Ratio | LeftOut]]:
    for case in cases:
        watched = replace(setting, progress=partial(update, case.name))
        try:
            if case.on_model is not None and runtime is not None:
                yield case.name, case.on_model(case, watched, runtime)
            elif case.in_processes is not None:
                yield case.name, case.in_processes(case, watched)
        # A model that cannot do one thing, such as hold 8 sequences, can still be measured at others.
        except LeftOutError as error:
            yield case.name, LeftOut(case.name, str(error))
        except (MeasurementError, OffsetError) as error:
            yield case.name, LeftOut(case.name, str(error), failed=True)

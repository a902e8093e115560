"""One loaded base model for all who name it in this process."""

from __future__ import annotations

import atexit
import threading
from pathlib import Path

from offset_runtime.engine import EngineSettings
from offset_runtime.models import ModelSpec, load_backend
from offset_runtime.runtime import OffsetRuntime


class SharedRuntimes:
    """The runtimes of this process, one for each model spec and settings; loaded at first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loading: dict[object, threading.Lock] = {}
        self._runtimes: dict[object, OffsetRuntime] = {}

    def get(self, spec: ModelSpec, settings: EngineSettings | None = None) -> OffsetRuntime:
        """Return the runtime of `spec`, loading the model if there is none, or none that is alive.

        Threads that ask at once wait for one load; other models load beside it. Raises what
        `load_backend` raises.
        """
        key = (_resolved(spec), settings or EngineSettings())
        with self._lock:
            loading = self._loading.setdefault(key, threading.Lock())
        with loading:
            with self._lock:
                runtime = self._runtimes.get(key)
                if runtime is not None and runtime.engine.alive:
                    return runtime
                self._runtimes.pop(key, None)
            if runtime is not None:
                # An engine that died still holds its model, and two may not fit in memory.
                runtime.close()
            runtime = OffsetRuntime(load_backend(spec), settings=settings, model=spec.base)
            with self._lock:
                self._runtimes[key] = runtime
            return runtime

    def close(self) -> None:
        """Close every runtime. Later calls of `get` load again; one that is loading now keeps what it loads."""
        with self._lock:
            runtimes = list(self._runtimes.values())
            self._runtimes.clear()
        for runtime in runtimes:
            runtime.close()


def _resolved(spec: ModelSpec) -> ModelSpec:
    path = Path(spec.base).expanduser()
    return spec.model_copy(update={"base": str(path.resolve())}) if path.exists() else spec


# The base model is the process's largest object, and every agent that names it must get the same one.
shared_runtimes = SharedRuntimes()
atexit.register(shared_runtimes.close)

"""What a run takes from a folder of saved state, and leaves there for the next."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Self

from offset_runtime.errors import OffsetError
from offset_runtime.runtime import OffsetRuntime
from offset_runtime.state_folder import StateFolder

_log = logging.getLogger(__name__)


class SavedState:
    """Restores state from `folder` on entry, and saves what the runtime then holds on exit; without one, does nothing.

    It is saved after an interrupt or an error too: then the same is likely to be read once more.

    Entering raises what `OffsetRuntime.restore_state` raises; leaving what `save_state` does, unless another error is
    on its way.
    """

    def __init__(self, runtime: OffsetRuntime, folder: StateFolder | None) -> None:
        self._runtime = runtime
        self._folder = folder
        self._restored = self._saved = 0

    def __enter__(self) -> Self:
        if self._folder is not None:
            self._restored = self._runtime.restore_state(self._folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is None:
            return
        try:
            self._saved = self._runtime.save_state(self._folder)
        except OffsetError as failure:
            if error is None:
                raise
            _log.warning("what the model has read is not saved: %s", failure)

    @property
    def line(self) -> str:
        """What was restored and saved, in one line; empty without a folder."""
        if self._folder is None:
            return ""
        return (
            f"state in {self._folder.path}: entries restored: {self._restored} "
            f"({self._folder.read_bytes / 1e6:.1f} MB read), kept for the next run: {self._saved} "
            f"({self._folder.written_bytes / 1e6:.1f} MB newly written)"
        )

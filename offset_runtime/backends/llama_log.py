"""llama.cpp's log, as records of Python's `logging` and not as lines on the terminal."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from llama_cpp import llama_cpp

# As in ggml.h: debug, info, warning, error (the names in llama_cpp/_logger.py are off by one). A load is some
# hundred lines of info, and its warnings tell of how the file was made, which a user cannot change.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_CONTINUED = 5

_log = logging.getLogger("offset_runtime.llama_cpp")


class LlamaLog:
    """Receives llama.cpp's log for the process; its logger is ``offset_runtime.llama_cpp``."""

    def __init__(self) -> None:
        self._complaints: deque[str] = deque(maxlen=20)
        self._line = ""
        self._level = logging.DEBUG
        # Kept, since llama.cpp holds a bare pointer to it.
        self._callback = llama_cpp.llama_log_callback(self._take)

    def install(self) -> None:
        """Make llama.cpp log here, whoever it logged to before, and forget earlier complaints."""
        self._complaints.clear()
        llama_cpp.llama_log_set(self._callback, None)

    def complaint(self) -> str:
        """What llama.cpp last complained of since `install`, in one line."""
        return "; ".join(list(self._complaints)[-2:]) or "it gives no reason"

    def _take(self, level: int, text: bytes, _data: Any) -> None:
        if level != _CONTINUED:
            self._level = _LEVELS.get(level, logging.DEBUG)
        self._line += text.decode("utf-8", errors="replace")
        if not self._line.endswith("\n"):
            return
        line, self._line = self._line.strip(), ""
        if self._level >= logging.ERROR:
            self._complaints.append(line)
        if line:
            _log.log(self._level, "%s", line)


# llama.cpp has one log for the whole process.
llama_log = LlamaLog()

"""Waiting in tests for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 20


def until(true: Callable[[], bool]) -> None:
    """Return as soon as `true` is; fail after `PATIENCE_S` seconds."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.001)

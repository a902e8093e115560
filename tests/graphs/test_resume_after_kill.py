"""A killed process loses only the agent that had not finished."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume_after_kill.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("resume_after_kill_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_after_a_kill_only_the_unfinished_agent_runs_again(example: Any, tmp_path: Path) -> None:
    before, after = example.demonstrate("fake", tmp_path / "checkpoints.sqlite")
    assert sorted(before) == ["headline", "reporter"]
    assert after == ["speech"]

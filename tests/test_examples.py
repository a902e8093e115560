"""Each example runs as its page says, and prints what it is there to show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# Examples, and what each prints, in this order (regular expressions).
SHOWN = {
    "langchain_chain": [
        r"news, as it comes: \w",
        r"speech \(offset \w{8}, \d+ tokens\):\n\w",
        r"computing \(offset \w{8}, \d+ tokens\):\n\w",
    ],
    "existing_graph": [r"report \[news\]: \w", r"speak \[speech\]: \w"],
    "custom_tool": [r"call: +find_ferry\(", r"result: The ferry", r"answer: \w"],
    "supervisor_team": [r"supervisor -> \w+", r"\w+ \[\w+\]: \w"],
    "router": [
        r"Police say .*\n  news \(news \+0\.\d\d, .*\n  news: \w",
        r"I ask the Congress .*\n  speech \(speech \+0\.\d\d, .*\n  speech: \w",
        r"A program which .*\n  computing \(computing \+0\.\d\d, .*\n  computing: \w",
        r"Thanks, .*\n  unsure \(.*\n  editor: \w",
    ],
    "rag_reranking": [
        r"by words:\n +\d+\.\d\d  A cache ",
        r"by likelihood of the question, nats a token:\n +-\d\.\d\d  (A compiler|An interpreter) reads ",
        r"What does a program need .*\n  \w",
    ],
}

# Run by other tests, without the real model.
ELSEWHERE = {"resume_after_kill"}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SHOWN.keys() | ELSEWHERE


@pytest.mark.parametrize("name", sorted(SHOWN.keys() | ELSEWHERE))
def test_an_example_says_first_what_it_shows_and_how_it_is_run(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")

    assert re.match(rf'"""[A-Z].*\.\n\n    python examples/{name}\.py', text)


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_an_example_shows_what_it_is_there_for(name: str) -> None:
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    at = 0
    for pattern in SHOWN[name]:
        found = re.compile(pattern).search(result.stdout, at)
        assert found, f"no {pattern!r} after character {at} of:\n{result.stdout}"
        at = found.end()

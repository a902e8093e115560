"""What the README and the pages under docs/ show is true: code runs, workflows load, commands exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from offset_runtime.cli import app
from offset_runtime.graphs.loader import read_workflow

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples/newsroom/README.md"]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)\)")


def blocks(language: str) -> list[tuple[str, str]]:
    """(page and number, text) of every block in `language`."""
    found = []
    for page in PAGES:
        texts = [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]
        found.extend((f"{page.relative_to(ROOT)} {number}", text) for number, text in enumerate(texts, start=1))
    return found


def commands() -> list[str]:
    lines = [line for _, text in blocks("") for line in text.splitlines()]
    return [line for line in lines if line.startswith("offset-runtime ")]


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("code", [pytest.param(text, id=name) for name, text in blocks("python")])
def test_python_blocks_run(code: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (workflow,) = [text for name, text in blocks("yaml") if name == "docs/workflows.md 1"]
    (tmp_path / "helpdesk.yaml").write_text(workflow)

    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in blocks("yaml")])
def test_workflows_are_valid(text: str, tmp_path: Path) -> None:
    file = tmp_path / "workflow.yaml"
    file.write_text(text)

    assert read_workflow(file).agents


@pytest.mark.parametrize("command", commands())
def test_commands_and_their_options_exist(command: str) -> None:
    name, *words = shlex.split(command)
    found = typer.main.get_command(app)
    context = found.make_context(name, words, resilient_parsing=True)

    # Parsing alone: an unknown option or a missing argument raises, and nothing runs.
    while hasattr(context.command, "resolve_command"):
        name, found, words = context.command.resolve_command(context, words)
        assert found is not None
        context = found.make_context(name, words, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page}: {target}"


def test_the_first_command_stands_within_fifteen_lines() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()

    assert "make demo" in "\n".join(lines[:15])

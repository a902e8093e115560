"""Everything is logged under the package's name, and shown only where an application asks for it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import offset_runtime

PACKAGE = Path(offset_runtime.__file__).parent
# The folders of agents and graphs are links, which a glob does not follow.
FOLDERS = (PACKAGE, PACKAGE / "agents", PACKAGE / "graphs")
SOURCES = sorted({file.resolve() for folder in FOLDERS for file in folder.resolve().rglob("*.py")})


def calls(pattern: str) -> dict[str, list[str]]:
    """What `pattern` finds in each source file, by the file's name."""
    found = {source.name: re.findall(pattern, source.read_text(encoding="utf-8")) for source in SOURCES}
    return {name: hits for name, hits in found.items() if hits}


def test_every_logger_stands_under_the_name_of_the_package() -> None:
    named = calls(r"getLogger\((.*?)\)")

    assert {"engine.py", "models.py", "chat_model.py", "routing.py"} <= named.keys()
    assert {name for names in named.values() for name in names} == {
        "__name__",
        '"offset_runtime"',
        '"offset_runtime.llama_cpp"',
    }


def test_nothing_is_logged_past_the_loggers_of_the_modules() -> None:
    assert calls(r"\blogging\.(?:debug|info|warning|error|exception|critical|basicConfig)\(.*") == {}


def test_the_package_leaves_it_to_the_application_whether_its_log_is_shown(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [type(handler) for handler in logging.getLogger("offset_runtime").handlers] == [logging.NullHandler]

    # As in a process that never set logging up, where Python itself would print warnings.
    monkeypatch.setattr(logging.getLogger("offset_runtime"), "propagate", False)
    logging.getLogger("offset_runtime.engine").warning("unseen")

    assert capfd.readouterr() == ("", "")

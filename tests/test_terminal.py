"""Errors reach users as one message and an exit code; results and messages go to different streams."""

from __future__ import annotations

import errno
import json
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import ClassVar

import pytest
import typer
from typer.testing import CliRunner

from offset_runtime.errors import UnknownDomainError
from offset_runtime.terminal import CommandGroup, print_error, print_json, progress_bar

runner = CliRunner()


class Lazy(CommandGroup):
    lazy: ClassVar[Mapping[str, tuple[str, str]]] = {
        "json": ("json:dumps_that_is_not_there", "Never loads."),
        "greet": ("greetings:greet", "Greet someone."),
        "group": ("greetings:group", "Several greetings."),
    }


def app_that(action: Callable[[], None], cls: type[CommandGroup] = CommandGroup) -> typer.Typer:
    app = typer.Typer(cls=cls, pretty_exceptions_enable=False)

    @app.callback()
    def options(debug: bool = False) -> None:
        """Options."""

    @app.command()
    def act() -> None:
        """Act."""
        action()

    return app


def raising(error: BaseException) -> typer.Typer:
    def action() -> None:
        raise error

    return app_that(action)


def test_a_users_error_is_one_message_and_exit_code_2() -> None:
    result = runner.invoke(raising(UnknownDomainError("legale", ["legal"])), ["act"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "error: unknown domain 'legale'; known domains: legal; did you mean 'legal'?\n"


def test_an_unexpected_error_is_called_internal_and_says_how_to_see_more() -> None:
    result = runner.invoke(raising(ZeroDivisionError("by zero")), ["act"])
    assert result.exit_code == 1
    assert result.stderr.startswith("internal error: ZeroDivisionError: by zero; run with")
    assert "--debug" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("error", "code"), [(ZeroDivisionError("by zero"), 1), (UnknownDomainError("x", []), 2)])
def test_debug_shows_the_traceback(error: Exception, code: int) -> None:
    result = runner.invoke(raising(error), ["--debug", "act"])
    assert result.exit_code == code
    assert "Traceback" in result.stderr


def test_ctrl_c_ends_with_130_and_a_short_word() -> None:
    result = runner.invoke(raising(KeyboardInterrupt()), ["act"])
    assert result.exit_code == 130
    assert result.stderr == "interrupted: stopped by the keyboard\n"


def test_typers_own_exits_and_option_errors_pass() -> None:
    assert runner.invoke(raising(typer.Exit(7)), ["act"]).exit_code == 7
    result = runner.invoke(raising(typer.BadParameter("no such number")), ["act"])
    assert result.exit_code == 2
    assert "no such number" in result.stderr
    assert "internal error" not in result.stderr
    assert runner.invoke(app_that(lambda: None), ["act", "--nonsense"]).exit_code == 2


def test_a_closed_pipe_is_no_error_of_ours() -> None:
    result = runner.invoke(raising(BrokenPipeError(errno.EPIPE, "closed")), ["act"])
    assert "internal error" not in result.stderr


def test_warnings_of_the_package_are_shown_and_the_handler_goes_again() -> None:
    logger = logging.getLogger("offset_runtime")
    before = list(logger.handlers)
    result = runner.invoke(
        app_that(lambda: logging.getLogger("offset_runtime.documents").warning("3 left out")), ["act"]
    )
    assert "3 left out" in result.stderr
    assert result.stdout == ""
    assert logger.handlers == before


def test_library_warnings_are_kept_from_the_terminal_but_not_under_debug() -> None:
    def warn() -> None:
        warnings.warn("something is deprecated", DeprecationWarning, stacklevel=1)

    assert runner.invoke(app_that(warn), ["act"]).exit_code == 0
    # Under --debug the filters stay as they are, and the tests' own filter makes warnings errors.
    assert runner.invoke(app_that(warn), ["--debug", "act"]).exit_code == 1


def test_paths_in_messages_are_not_broken_nor_read_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("no file [red]" + "x" * 300)
    assert capsys.readouterr().err == "error: no file [red]" + "x" * 300 + "\n"


def test_json_keeps_characters_and_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"text": "Größe"})
    captured = capsys.readouterr()
    assert "Größe" in captured.out
    assert json.loads(captured.out) == {"text": "Größe"}
    assert captured.err == ""


def test_progress_leaves_nothing_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("working") as update:
        update("still working", 1, 2)
    assert capsys.readouterr().out == ""


@pytest.fixture
def greetings(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "greetings.py").write_text(
        "import typer\n"
        "def greet(name: str) -> None:\n    typer.echo(f'hello {name}')\n"
        "group = typer.Typer()\n"
        "@group.command()\ndef twice(name: str) -> None:\n    typer.echo(f'{name}, {name}')\n"
        "@group.command()\ndef fail() -> None:\n"
        "    from offset_runtime.errors import WorkflowError\n    raise WorkflowError('line 3: no such agent')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_lazy_commands_are_listed_without_being_imported() -> None:
    result = runner.invoke(app_that(lambda: None, Lazy), ["--help"])
    assert result.exit_code == 0
    assert "Greet someone." in result.stdout


@pytest.mark.usefixtures("greetings")
def test_lazy_functions_and_groups_run_when_called() -> None:
    app = app_that(lambda: None, Lazy)
    assert runner.invoke(app, ["greet", "Ada"]).stdout == "hello Ada\n"
    assert runner.invoke(app, ["group", "twice", "Ada"]).stdout == "Ada, Ada\n"
    assert "twice" in runner.invoke(app, ["group", "--help"]).stdout


@pytest.mark.usefixtures("greetings")
def test_errors_inside_a_lazy_group_are_users_errors_too() -> None:
    result = runner.invoke(app_that(lambda: None, Lazy), ["group", "fail"])
    assert result.exit_code == 2
    assert result.stderr == "error: line 3: no such agent\n"

"""The terminal: consoles, progress, errors and log messages as users see them."""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.traceback import Traceback
from typer.core import TyperCommand, TyperGroup

from offset_runtime.errors import OffsetError

EXIT_INTERNAL = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


@cache
def output() -> Console:
    """The console of results: standard output."""
    return Console()


@cache
def messages() -> Console:
    """The console of everything else: standard error. One for all, so that progress and messages do not collide."""
    return Console(stderr=True)


def print_json(value: object) -> None:
    """Print a result as JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_error(text: str, *, kind: str = "error") -> None:
    """Print one error message, in red, on standard error; long paths are not broken."""
    messages().print(f"{kind}: {text}", style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(description: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on standard error, if that is a terminal, while the block runs.

    Yields update(description, done, total).
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    silent = not messages().is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=messages(), transient=True, disable=silent) as progress:
        task = progress.add_task(description, total=None)
        yield lambda text, done, total: progress.update(task, description=text, completed=done, total=total)


@contextmanager
def spinner(description: str) -> Iterator[None]:
    """Show a note on standard error, if that is a terminal, while the block runs."""
    if not messages().is_terminal:
        yield
        return
    with messages().status(description):
        yield


def quiet_libraries() -> None:
    """Keep the progress bars and warnings of transformers off the terminal. Call before a model is loaded."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


class CommandGroup(TyperGroup):
    """Commands whose errors end as one message and an exit code, without a traceback.

    `lazy` maps a command's name to (``module:attribute`` of a typer app or a function, help). Such a
    command is imported when it is called, so the help of the others stays fast.
    """

    lazy: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (target, text) in self.lazy.items():
            self.add_command(_LazyCommand(name, target, text))

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]  # older typers take click's own class
        debug = bool(ctx.params.get("debug"))
        with _log_messages(), _library_warnings(shown=debug):
            try:
                return super().invoke(ctx)
            except OffsetError as error:
                code = EXIT_USER_ERROR
                _report(error, str(error), "error", debug)
            except KeyboardInterrupt as error:
                code = EXIT_INTERRUPTED
                _report(error, "stopped by the keyboard", "interrupted", debug)
            except Exception as error:
                if _is_typers_own(error):
                    raise
                code = EXIT_INTERNAL
                text = f"{type(error).__name__}: {error}; run with 'offset-runtime --debug …' for the traceback"
                _report(error, text, "internal error", debug)
        raise typer.Exit(code)


class _LazyCommand(TyperCommand):
    def __init__(self, name: str, target: str, text: str) -> None:
        super().__init__(name=name, callback=None, help=text)
        self._target = target

    def make_context(self, *args: Any, **extra: Any) -> Any:
        module, attribute = self._target.split(":")
        found = getattr(importlib.import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            found = _single_command(found)
        return typer.main.get_command(found).make_context(*args, **extra)


def _single_command(function: Callable[..., Any]) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return app


def _report(error: BaseException, text: str, kind: str, debug: bool) -> None:
    if debug:
        messages().print(Traceback.from_exception(type(error), error, error.__traceback__))
    print_error(text, kind=kind)


def _is_typers_own(error: Exception) -> bool:
    """Whether `error` is how typer exits, reports a wrong option, or learns that the reader of a pipe is gone."""
    if isinstance(error, OSError):
        return error.errno == errno.EPIPE
    return hasattr(error, "exit_code") or isinstance(error, typer.Abort)


@contextmanager
def _log_messages() -> Iterator[None]:
    """Show the package's warnings on standard error while a command runs."""
    handler = RichHandler(console=messages(), level=logging.WARNING, show_time=False, show_path=False)
    logger = logging.getLogger("offset_runtime")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _library_warnings(*, shown: bool) -> Iterator[None]:
    with warnings.catch_warnings():
        if not shown and not sys.warnoptions:
            warnings.simplefilter("ignore")
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        yield

"""Which way a workflow goes on: `path` functions, the built-in `reply_contains`, and handoffs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from langgraph.errors import GraphBubbleUp

from offset_runtime.errors import WorkflowError, nearest_hint
from offset_runtime.graphs.schema import ANY, END, REPLY_CONTAINS, Agent, Edge

State = Mapping[str, Any]
PathFunction = Callable[[State], object]

# Small models dress the line up: as a list, quoted, bold, with an article, with a full-width colon.
_DRESS = r"*_`\"'<\[“”‘’«-"
_HANDOFF = re.compile(
    rf"^[ \t>{_DRESS}]*(?:\(?\d+[.):][ \t{_DRESS}]*)?handoff[ \t*_`]*[:\uff1a][\s{_DRESS}]*(?:the[ \t]+[{_DRESS}]*)?"
    r"([A-Za-z][A-Za-z0-9_-]*)",
    re.IGNORECASE | re.MULTILINE,
)
_NEAR_HANDOFF = re.compile(r"^.*\bhand[ _-]?off\b.*$", re.IGNORECASE | re.MULTILINE)

# Of a line that is quoted in a warning.
_SHOWN_CHARACTERS = 120

_log = logging.getLogger(__name__)


def edge_router(edge: Edge, folder: Path, *, where: str = "") -> Callable[[State], list[str]]:
    """Return the function that gives the keys of `edge.targets` to follow, for a state with `messages`.

    Raises `WorkflowError` for a `path` that cannot be used; so does the router, which begins with `where`
    (file and line), for a function that fails, no key, and a key that is none.
    """
    assert edge.path is not None
    assert edge.targets is not None
    targets, source = edge.targets, edge.source[0]
    function = _reply_contains(targets) if edge.path == REPLY_CONTAINS else path_function(edge.path, folder)

    this = f"{where}: " * bool(where) + f"path {edge.path!r} of the edge from {source!r}"

    def route(state: State) -> list[str]:
        try:
            found = function(state)
        except GraphBubbleUp:  # how LangGraph interrupts a run
            raise
        # SystemExit too: it would end the run's thread without a word.
        except (Exception, SystemExit) as error:
            raise WorkflowError(f"{this} failed{_place(error)}: {error!r}; correct the function") from error
        keys = list(found) if isinstance(found, (list, tuple)) else [found]
        if not keys:
            raise WorkflowError(f"{this} returned no key; expected one or more of its targets: {', '.join(targets)}")
        for key in keys:
            if not isinstance(key, str) or key not in targets:
                raise WorkflowError(
                    f"{this} returned {key!r}; expected one of its "
                    f"targets: {', '.join(targets)}{nearest_hint(str(key), targets)}"
                )
        return [str(key) for key in keys]

    # LangGraph tells the conditional edges of one node apart by this name.
    route.__name__ = edge.path
    return route


def path_function(reference: str, folder: Path) -> PathFunction:
    """Import ``module:function``, with `folder` (the workflow file's) searched first.

    This runs the module, so a workflow file is to be trusted as far as the code it names. Raises
    `WorkflowError` when there is no such module or function, or it is not a plain function of the state.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise WorkflowError(f"path {reference!r} is no 'module:function' and not {REPLY_CONTAINS!r}")
    module = _import(module_name, folder, reference)
    function = getattr(module, name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise WorkflowError(
            f"path {reference!r}: module {module_name!r} has no function {name!r}{nearest_hint(name, names)}"
        )
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise WorkflowError(
            f"path {reference!r} is not an ordinary function; expected one that takes the state and returns a key"
        )
    if not _takes_one(function):
        raise WorkflowError(
            f"path {reference!r}: {name}{inspect.signature(function)} cannot be called with one argument; "
            "expected a function that takes the state and returns a key"
        )
    return function  # type: ignore[no-any-return]


def handoff_instruction(agents: Mapping[str, Agent], handoffs: Sequence[str]) -> str:
    """The sentence added to the system prompt of an agent that may hand over."""
    described = [
        f"{name} ({agents[name].description})" if name in agents and agents[name].description else name
        for name in handoffs
    ]
    return (
        'To pass the conversation on, end your reply with a line "handoff: NAME", where NAME is one of: '
        f"{', '.join(described)}."
    )


def handoff_route(agent: str, handoffs: Sequence[str]) -> Callable[[str], str]:
    """Return the function that reads the last ``handoff: NAME`` line of a reply: NAME, or END without one."""
    names = {name.lower(): name for name in handoffs}

    def route(reply: str) -> str:
        found = _HANDOFF.findall(reply)
        if not found:
            if near := _NEAR_HANDOFF.search(reply):
                _log.warning(
                    "agent %r wrote %r, which is no line 'handoff: NAME'; the workflow ends here",
                    agent,
                    near.group().strip()[:_SHOWN_CHARACTERS],
                )
            return END
        written = found[-1].lower()
        # A name may end so, but more often it is the end of a word in bold.
        target = names.get(written) or names.get(written.rstrip("_-*"))
        if target is None:
            _log.warning(
                "agent %r handed over to %r, which is none of its handoffs (%s); the workflow ends here",
                agent,
                found[-1],
                ", ".join(handoffs),
            )
        return target or END

    return route


def _reply_contains(targets: Mapping[str, str]) -> PathFunction:
    words = {key: _whole(key.strip().casefold()) for key in targets if key != ANY}

    def first_contained(state: State) -> str:
        messages = state.get("messages") or []
        reply = str(messages[-1].text).casefold() if messages else ""
        return next((key for key, pattern in words.items() if pattern.search(reply)), ANY)

    return first_contained


def _whole(key: str) -> re.Pattern[str]:
    """What finds `key` as whole words; a sign, or a letter of a script without spaces, may touch others."""
    before = r"(?<!\w)" if _spaced(key[:1]) else ""
    after = r"(?!\w)" if _spaced(key[-1:]) else ""
    return re.compile(before + re.escape(key) + after)


def _spaced(character: str) -> bool:
    # Scripts with upper and lower case have spaces between words.
    return character.isdecimal() or character == "_" or character.lower() != character.upper()


def _takes_one(function: Callable[..., object]) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True  # some built-in functions have none
    try:
        signature.bind(None)
    except TypeError:
        return False
    return True


def _place(error: BaseException) -> str:
    """Where in the code of the workflow's author `error` arose; nothing where the call itself failed."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    return f" in {frames[0].filename}, line {frames[0].lineno}" if frames else ""


def _import(module_name: str, folder: Path, reference: str) -> ModuleType:
    try:
        with _searched_first(folder):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and not (module_name + ".").startswith(error.name + "."):
            raise WorkflowError(f"path {reference!r}: module {module_name!r} needs {error.name!r}: {error}") from error
        others = [file.stem for file in folder.glob("*.py")]
        raise WorkflowError(
            f"path {reference!r}: no module {module_name!r}, neither in {folder} nor among the installed ones"
            f"{nearest_hint(module_name, others)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise WorkflowError(f"path {reference!r}: importing module {module_name!r} failed: {error!r}") from error
    beside = folder / f"{module_name.replace('.', '/')}.py"
    loaded = getattr(module, "__file__", None)
    if beside.is_file() and loaded is not None and not beside.samefile(loaded):
        raise WorkflowError(
            f"path {reference!r}: a module {module_name!r} was already imported from {loaded}, so {beside} is "
            "hidden by it; give the file another name"
        )
    return module


@contextlib.contextmanager
def _searched_first(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        # A module written a moment ago may be missing from the finder's cache.
        importlib.invalidate_caches()
        yield
    finally:
        sys.path.remove(str(folder))

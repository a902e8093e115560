"""Which way a workflow goes on: `path` functions, the built-in `reply_contains`, and handoffs."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from offset_runtime.errors import WorkflowError, nearest_hint
from offset_runtime.graphs.schema import END, REPLY_CONTAINS, Agent, Edge

ANY_REPLY = "*"

State = Mapping[str, Any]
PathFunction = Callable[[State], object]

_HANDOFF = re.compile(
    r"^[\s>*_`-]*handoff[\s*_`]*:[\s*_`\"'<\[]*([A-Za-z][A-Za-z0-9_-]*)", re.IGNORECASE | re.MULTILINE
)

_log = logging.getLogger(__name__)


def edge_router(edge: Edge, folder: Path) -> Callable[[State], list[str]]:
    """Return the function that gives the keys of `edge.targets` to follow, for a state with `messages`.

    Raises `WorkflowError` for a `path` that cannot be used; so does the router for a key that is none.
    """
    assert edge.path is not None
    assert edge.targets is not None
    targets, source = edge.targets, edge.source[0]
    function = _reply_contains(targets) if edge.path == REPLY_CONTAINS else path_function(edge.path, folder)

    def route(state: State) -> list[str]:
        found = function(state)
        keys = list(found) if isinstance(found, (list, tuple)) else [found]
        for key in keys:
            if key not in targets:
                raise WorkflowError(
                    f"path {edge.path!r} of the edge from {source!r} returned {key!r}; expected one of its "
                    f"targets: {', '.join(targets)}{nearest_hint(str(key), targets)}"
                )
        return [str(key) for key in keys]

    # LangGraph tells the conditional edges of one node apart by this name.
    route.__name__ = edge.path
    return route


def path_function(reference: str, folder: Path) -> PathFunction:
    """Import ``module:function``, with `folder` (the workflow file's) searched first.

    This runs the module, so a workflow file is to be trusted as far as the code it names. Raises
    `WorkflowError` when there is no such module or function, or it is not a plain function.
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
            return END
        target = names.get(found[-1].lower())
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
    def first_contained(state: State) -> str:
        messages = state.get("messages") or []
        reply = str(messages[-1].text).casefold() if messages else ""
        return next((key for key in targets if key != ANY_REPLY and key.casefold() in reply), ANY_REPLY)

    return first_contained


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
    except Exception as error:
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

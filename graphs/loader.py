"""Reading a workflow file: every error names the file, the line and the nearest valid name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic_core import ErrorDetails

from offset_runtime.errors import WorkflowError, nearest_hint
from offset_runtime.graphs.check import find_problems
from offset_runtime.graphs.findings import Finding, raise_findings
from offset_runtime.graphs.schema import Agent, BaseModelSection, Edge, LlamaCppSection, Location, Origin, Workflow

# A workflow is written by hand; a file beyond this is something else.
MAX_FILE_BYTES = 1 << 20

_MERGE = "tag:yaml.org,2002:merge"
_BOOL = "tag:yaml.org,2002:bool"
_KEY = "[key]"

_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "float_type": "a number",
    "finite_number": "a finite number",
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
    "tuple_type": "a list",
    "too_short": "at least one entry",
}


class _Loader(yaml.SafeLoader):
    """Reads yes, no, on and off as text, as YAML 1.2 does: they are natural names and keys of `targets`."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def load_workflow(path: str | os.PathLike[str]) -> Workflow:
    """Read and check a workflow file; loads no model.

    Raises one `WorkflowError` that lists everything that is wrong, each with file and line.
    """
    workflow = read_workflow(path)
    raise_findings(find_problems(workflow, files=True))
    return workflow


def read_workflow(path: str | os.PathLike[str]) -> Workflow:
    """Read a workflow file and check its keys and types, not yet what they refer to.

    Raises `WorkflowError` for a missing file, a syntax error, an unknown, missing or repeated key, or a
    value of the wrong type.
    """
    source = Path(path)
    data, lines = _parse(source, _read_text(source))
    origin = Origin(source, MappingProxyType(lines))
    if not isinstance(data, dict):
        raise WorkflowError(
            f"{origin.where()}: expected keys such as 'version', 'model' and 'agents'; found {_show(data)}"
        )
    try:
        workflow = Workflow.model_validate(data)
    except ValidationError as error:
        described = [_describe(details) for details in error.errors()]
        described.sort(key=lambda problem: origin.line(problem[0]))
        raise_findings(Finding(origin.where(location), text) for location, text in described)
        raise
    return workflow.with_origin(origin)


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            raise WorkflowError(f"{path} is a folder; expected a workflow file in YAML")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise WorkflowError(f"{path} has over {MAX_FILE_BYTES} bytes; expected a workflow file in YAML")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        others = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        listing = f"; there is {', '.join(others)}" if 0 < len(others) < 6 else ""
        raise WorkflowError(f"no workflow file {path}{nearest_hint(path.name, others) or listing}") from None
    except UnicodeDecodeError as error:
        raise WorkflowError(f"{path} is not in UTF-8 (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise WorkflowError(f"cannot read workflow file {path}: {error.strerror}") from error


def _parse(path: Path, text: str) -> tuple[Any, dict[Location, int]]:
    lines: dict[Location, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise WorkflowError(f"{path} is empty; expected keys such as 'version', 'model' and 'agents'")
        repeated = list(_number(loader, node, (), lines, set()))
        raise_findings(Finding(f"{path}, line {line}", text) for line, text in repeated)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        raise WorkflowError(_syntax_message(path, error)) from error
    except (yaml.YAMLError, ValueError) as error:
        raise WorkflowError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    except RecursionError:
        raise WorkflowError(f"{path}: nested too deeply for a workflow file") from None


def _number(
    loader: yaml.SafeLoader, node: yaml.Node, location: Location, lines: dict[Location, int], seen: set[int]
) -> Iterator[tuple[int, str]]:
    """Note the line of `node` and of all below it; yield the line and text of each key that is there twice."""
    lines.setdefault(location, node.start_mark.line + 1)
    if id(node) in seen:
        # An alias: it may repeat a large part, or contain itself.
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _number(loader, item, (*location, index), lines, seen)
    elif isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            if key_node.tag == _MERGE:
                continue
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                yield line, "a key must be text, not a list or a mapping"
                continue
            here = (*location, loader.construct_object(key_node))
            if here in lines:
                yield line, f"key {key_node.value!r} is there twice (first in line {lines[here]}); keep one"
            lines[here] = line
            yield from _number(loader, value, here, lines, seen)


def _syntax_message(path: Path, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{path}, line {mark.line + 1}" if mark else str(path)
    reason = " ".join(part for part in (error.context, error.problem) if part)
    hint = "; put text that contains ': ' in quotes" if "mapping values" in reason else ""
    return f"{where}: not valid YAML: {reason}{hint}"


def _describe(details: ErrorDetails) -> tuple[Location, str]:
    location = tuple(part for part in details["loc"] if part != _KEY)
    kind, value = details["type"], details["input"]
    text: str | None = None
    if kind == "extra_forbidden":
        text = _unknown_key(location)
    elif kind == "missing":
        text = f"missing key {location[-1]!r}{_inside(location[:-1])}"
        location = location[:-1]
    elif location == ("version",):
        text = f"unsupported version {_show(value)}; this release reads version 1"
    elif kind == "value_error":
        text = f"{_inside(location).removeprefix(' in ')}: {details['ctx']['error']}"
    elif kind == "string_pattern_mismatch":
        text = f"name {value!r} cannot name an agent; use letters, digits, '_' and '-', starting with a letter"
    elif _KEY in details["loc"]:
        text = f"expected a name as text{_inside(location[:-1])}; found {_show(value)}; put it in quotes"
    if text is None:
        expected = _EXPECTED.get(kind) or details["msg"].removeprefix("Input should be ")
        text = f"expected {expected} for {_dotted(location)}; found {_show(value)}"
    return location, text


def _unknown_key(location: Location) -> str:
    parent, key = location[:-1], str(location[-1])
    valid = _keys(parent)
    if key in valid:
        return f"key {key!r}{_inside(parent)} is there twice under two spellings; keep one"
    if parent and key in _keys(()):
        return f"unknown key {key!r}{_inside(parent)}; it is a key of the workflow, at its top level"
    return f"unknown key {key!r}{_inside(parent)}{nearest_hint(key, valid) or '; known keys: ' + ', '.join(valid)}"


def _keys(parent: Location) -> list[str]:
    sections: Mapping[str | int | None, type[BaseModel]] = {
        None: Workflow,
        "model": BaseModelSection,
        "agents": Agent,
        "edges": Edge,
    }
    section = LlamaCppSection if parent == ("model", "llama_cpp") else sections[parent[0] if parent else None]
    keys = []
    for name, info in section.model_fields.items():
        alias = info.validation_alias
        keys.extend([str(choice) for choice in alias.choices] if isinstance(alias, AliasChoices) else [name])
    return keys


def _inside(location: Location) -> str:
    match location:
        case ():
            return ""
        case ("agents", name):
            return f" in agent {name!r}"
        case ("edges", int(index)):
            return f" in edge {index + 1}"
        case _:
            return f" in {_dotted(location)}"


def _dotted(location: Location) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return f"{text.lstrip('.')!r}"


def _show(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

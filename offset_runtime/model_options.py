"""The options of commands that load a base model, and how such a command loads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from pydantic import ValidationError

from offset_runtime.backends.options import LlamaCppOptions
from offset_runtime.errors import InvalidRequestError, nearest_hint
from offset_runtime.models import BackendName, ModelSpec
from offset_runtime.terminal import quiet_libraries, spinner

if TYPE_CHECKING:
    from offset_runtime.backends.base import Backend


def _known_backend(name: str) -> str:
    if name not in get_args(BackendName):
        known = get_args(BackendName)
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}{nearest_hint(name, known)}")
    return name


ModelOption = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="Base model: a packaged name (smollm2-135m), hub id, folder or .gguf."
    ),
]
BackendOption = Annotated[
    str, typer.Option(callback=_known_backend, metavar="NAME", help=f"One of {', '.join(get_args(BackendName))}.")
]
DeviceOption = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="Where torch runs, such as cpu or cuda:0.", show_default="best")
]
LlamaCppOption = Annotated[
    list[str] | None,
    typer.Option(
        "--llama-cpp",
        metavar="KEY=VALUE",
        help=f"Option of llama.cpp; may be repeated. Keys: {', '.join(LlamaCppOptions.model_fields)}.",
        show_default=False,
    ),
]


def model_spec(
    model: str, backend: str = "auto", device: str | None = None, llama_cpp: Sequence[str] | None = None
) -> ModelSpec:
    """Return the spec that the options of a command name; nothing is loaded or looked up.

    `llama_cpp`: ``KEY=VALUE`` each. Raises `InvalidRequestError` for an option of llama.cpp that is unknown,
    given twice, or has a value it cannot have.
    """
    return ModelSpec(base=model, backend=backend, device=device, llama_cpp=_llama_cpp_options(llama_cpp or ()))


def training_spec(model: str, backend: str = "auto", device: str | None = None) -> ModelSpec:
    """Return the spec for a command that trains, which only torch can: under ``auto`` a .gguf runs there too.

    Raises `InvalidRequestError` for another backend by name.
    """
    if backend == "llama_cpp":
        raise InvalidRequestError(
            "training needs the torch backend, found --backend llama_cpp; leave --backend out. A .gguf is converted "
            "for torch, and the offset then works on the .gguf under llama_cpp"
        )
    return model_spec(model, "torch" if backend == "auto" else backend, device)


@contextmanager
def loaded(spec: ModelSpec) -> Iterator[Backend]:
    """Load a base model with a note on standard error, and close it after.

    Raises what `load_backend` raises.
    """
    from offset_runtime.models import chosen_backend, load_backend

    with spinner(f"loading {spec.base}"):
        if chosen_backend(spec) == "torch":
            quiet_libraries()
        backend = load_backend(spec)
    try:
        yield backend
    finally:
        backend.close()


def _llama_cpp_options(given: Sequence[str]) -> LlamaCppOptions:
    known = LlamaCppOptions.model_fields
    values: dict[str, str] = {}
    for option in given:
        key, separator, value = (part.strip() for part in option.partition("="))
        if not (key and separator and value):
            raise InvalidRequestError(f"--llama-cpp {option}: expected KEY=VALUE, for example n_ctx=4096")
        if key not in known:
            hint = nearest_hint(key, known) or f"; expected one of {', '.join(known)}"
            raise InvalidRequestError(f"--llama-cpp {option}: unknown key {key!r}{hint}")
        if key in values:
            raise InvalidRequestError(f"--llama-cpp {option}: {key} is given twice ({values[key]} before); keep one")
        values[key] = value
    try:
        return LlamaCppOptions.model_validate(values)
    except ValidationError as error:
        raise InvalidRequestError(_described(error)) from error


def _described(error: ValidationError) -> str:
    problem = error.errors()[0]
    if not problem["loc"]:
        return f"--llama-cpp: {problem['msg'].removeprefix('Value error, ')}"
    expected = {"int_parsing": "a whole number", "bool_parsing": "true or false"}.get(
        problem["type"], problem["msg"].removeprefix("Input should be ")
    )
    return f"--llama-cpp {problem['loc'][0]}={problem['input']}: expected {expected}; found {problem['input']!r}"

"""What a workflow file may say: agents with domains, and the edges between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from offset_runtime.agents.sampling_fields import SAMPLING_FIELDS, check_limits
from offset_runtime.agents.transcript import History
from offset_runtime.backends.options import LlamaCppOptions
from offset_runtime.models import BackendName, ModelSpec

START = "START"
END = "END"
REPLY_CONTAINS = "reply_contains"
# The key of `targets` for whatever no other key is for.
ANY = "*"

# A place in the file: the keys and indices that lead to it, such as ("agents", "legal", "domain").
Location = tuple[str | int, ...]

_SPELLINGS = {"__start__": START, "__end__": END}


def _one_or_many(value: object) -> object:
    """Let a list, or a single value in its place, fill a tuple."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str) else value


def _node(value: object) -> object:
    return _SPELLINGS.get(value, value) if isinstance(value, str) else value


# Letters, digits, "_" and "-" only: names become node names, message names and Mermaid ids.
AgentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
Node = Annotated[str, BeforeValidator(_node)]
Nodes = Annotated[tuple[Node, ...], BeforeValidator(_one_or_many), Field(min_length=1)]
Names = Annotated[tuple[Node, ...], BeforeValidator(_one_or_many)]
Texts = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class _Section(BaseModel):
    # Strict: YAML's own types are checked, so that `max_tokens: yes` is not 1.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a workflow came from: its file, and the line (from 1) of each place in it."""

    path: Path | None = None
    lines: Mapping[Location, int] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def folder(self) -> Path:
        """The folder that relative paths and `path` functions are looked up in."""
        return Path.cwd() if self.path is None else self.path.resolve().parent

    def where(self, location: Location = ()) -> str:
        """Name the file and the line of `location`, or of the nearest place around it."""
        if self.path is None:
            return "workflow" + "".join(f"[{part!r}]" for part in location)
        line = self.line(location)
        return f"{self.path}, line {line}" if line else str(self.path)

    def line(self, location: Location = ()) -> int:
        """The line of `location`, or of the nearest place around it; 0 where none is known."""
        for size in range(len(location), -1, -1):
            if location[:size] in self.lines:
                return self.lines[location[:size]]
        return 0


class LlamaCppSection(LlamaCppOptions):
    """How llama.cpp runs the base model; the fields are those of `LlamaCppOptions`."""

    model_config = ConfigDict(strict=True)


class BaseModelSection(_Section):
    """The base model all agents share; the fields are those of `ModelSpec`."""

    base: str
    backend: BackendName = "auto"
    dtype: str | None = None
    device: str | None = None
    llama_cpp: LlamaCppSection = LlamaCppSection()

    @model_validator(mode="after")
    def _settings_are_of_the_backend(self) -> Self:
        if self.backend == "torch" and self.llama_cpp != LlamaCppSection():
            raise ValueError("llama_cpp is not for backend torch; leave one of them out")
        if self.backend == "llama_cpp" and (self.dtype or self.device):
            raise ValueError("dtype and device are torch's; leave them out with backend llama_cpp")
        return self

    def spec(self) -> ModelSpec:
        return ModelSpec(**self.model_dump())


class Agent(_Section):
    """An agent: its domain, its instructions and how it replies.

    `domain` None is the plain base. `strength` scales the offset. `reads`: whose messages it sees,
    by agent name or START for the input; None is everything. `handoffs`: whom it may hand over to, by
    ending its reply with a line ``handoff: NAME``. Sampling fields that are None are the chat model's
    defaults. `timeout_s`: seconds for one reply, waiting included.
    """

    domain: str | None = None
    system_prompt: str = ""
    description: str = ""
    strength: float = Field(default=1.0, allow_inf_nan=False)
    reads: Names | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Texts | None = None
    timeout_s: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    handoffs: Names = ()

    @field_validator(*SAMPLING_FIELDS, "stop")
    @classmethod
    def _check_sampling(cls, value: Any, info: ValidationInfo) -> Any:
        check_limits(str(info.field_name), value)
        return value


class Edge(_Section):
    """A way from agents to agents.

    `source`: an agent or START; several are all waited for. Either `target`, where several run in
    parallel, or `path` with `targets`: `path` names a function ``module:function`` that is called with
    the state and returns a key of `targets`, or several; or it is ``reply_contains``, which takes the
    first key that the last reply contains as whole words, upper or lower case, and ``*`` where none is found.

    Or `route` is ``likelihood`` and the keys of `targets` are domains: the last message goes to that of the domain
    whose offset makes it likeliest, and to ``*`` where it leads the next by less than `margin` (nats a token; 0 where
    left out).
    """

    source: Nodes = Field(validation_alias=AliasChoices("source", "from"))
    target: Nodes | None = Field(default=None, validation_alias=AliasChoices("target", "to"))
    path: str | None = None
    route: Literal["likelihood"] | None = None
    margin: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    targets: dict[str, Node] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _plain_or_conditional(self) -> Self:
        chosen = [key for key in ("path", "route") if getattr(self, key) is not None]
        if len(chosen) == 2:
            raise ValueError("found 'path' beside 'route'; an edge has either")
        if self.margin is not None and self.route is None:
            raise ValueError("found 'margin' without 'route: likelihood', which alone has one; leave it out")
        if self.target is not None and (chosen or self.targets is not None):
            others = "'route'" if self.route else "'path'"
            raise ValueError(f"found 'target' beside {others} or 'targets'; an edge has either")
        if self.target is None and not chosen and self.targets is None:
            raise ValueError("found no 'target'; expected 'target', or 'path' or 'route' with 'targets'")
        if self.target is None and not chosen:
            raise ValueError("'targets' go together with 'path' or 'route'; both are missing")
        if self.target is None and self.targets is None:
            raise ValueError(f"{chosen[0]!r} and 'targets' go together; one of them is missing")
        return self

    @property
    def conditional(self) -> bool:
        return self.targets is not None

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains a `route` chooses from."""
        return tuple(key for key in self.targets or {} if key != ANY) if self.route else ()

    @property
    def ends(self) -> tuple[str, ...]:
        """Every node the edge may lead to."""
        return self.target if self.target is not None else tuple(dict.fromkeys((self.targets or {}).values()))


class Workflow(_Section):
    """A workflow of agents on one base model.

    `domains`: offset files by domain name. `store`: a folder of offsets, for domains that `domains`
    does not name. In a file both are relative to the file. `history`: how agents are shown the messages, as in
    `agent_node`; None leaves it to the workflow's pattern (`graphs.history`).
    """

    version: Literal[1]
    name: str
    description: str = ""
    model: BaseModelSection
    domains: dict[str, str] = Field(default_factory=dict)
    store: str | None = None
    history: History | None = None
    agents: dict[AgentName, Agent] = Field(min_length=1)
    edges: Annotated[tuple[Edge, ...], BeforeValidator(_one_or_many), Field(min_length=1)]

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def origin(self) -> Origin:
        """The file this workflow was read from, if any."""
        return self._origin

    def with_origin(self, origin: Origin) -> Workflow:
        """Return this workflow with relative paths resolved against the folder of `origin`."""
        folder = origin.folder
        model = self.model
        if model.base.startswith(("./", "../")):
            model = model.model_copy(update={"base": str(folder / model.base)})
        update: dict[str, Any] = {
            "model": model,
            "domains": {name: str(folder / Path(path).expanduser()) for name, path in self.domains.items()},
            "store": None if self.store is None else str(folder / Path(self.store).expanduser()),
        }
        placed = self.model_copy(update=update)
        placed._origin = origin
        return placed

    def routes(self) -> Iterator[tuple[str, str, str | None]]:
        """Yield (source, target, label) of every way through the workflow; the label is None when always taken."""
        for edge in self.edges:
            for source in edge.source:
                if edge.targets is None:
                    yield from ((source, target, None) for target in edge.ends)
                else:
                    yield from ((source, target, key) for key, target in edge.targets.items())
        for name, agent in self.agents.items():
            if agent.handoffs:
                yield from ((name, target, "handoff") for target in dict.fromkeys((*agent.handoffs, END)))

"""What is wrong with a workflow beyond its syntax; everything is reported at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from offset_runtime.errors import OffsetError, WorkflowError, nearest_hint
from offset_runtime.graphs.findings import Finding
from offset_runtime.graphs.flow import choices, endless_cycles, joins_behind_choice, reachable
from offset_runtime.graphs.routing import path_function
from offset_runtime.graphs.schema import ANY, END, REPLY_CONTAINS, START, Edge, Location, Workflow
from offset_runtime.offset import DomainOffset
from offset_runtime.runtime import OffsetRuntime
from offset_runtime.sampling import SamplingParams
from offset_runtime.store import OffsetStore

Problem = tuple[Location, str]


def find_problems(workflow: Workflow, *, files: bool) -> list[Finding]:
    """Return what is wrong with domains, edges, routes and reads, in the order of the file.

    `files`: read the offset files too. Modules that a `path` names are imported. No model is loaded.
    """
    problems = [
        *_domain_problems(workflow),
        *_agent_problems(workflow),
        *_edge_problems(workflow),
        *_flow_problems(workflow),
        *_join_problems(workflow),
    ]
    if files:
        problems.extend(_offset_problems(workflow))
    return _findings(workflow, problems)


def find_model_problems(workflow: Workflow, runtime: OffsetRuntime) -> list[Finding]:
    """Return what does not fit the base model of `runtime`, or what it lacks: a template, offsets, room for replies."""
    problems = [*_template_problems(workflow, runtime), *_context_problems(workflow, runtime)]
    for domain, location, path in _offset_files(workflow):
        try:
            runtime.offset(DomainOffset.load(path).renamed(domain))
        except OffsetError as error:
            problems.append((location, str(error)))
    return _findings(workflow, problems)


def _findings(workflow: Workflow, problems: Iterable[Problem]) -> list[Finding]:
    origin = workflow.origin
    ordered = sorted(problems, key=lambda problem: origin.line(problem[0]))
    return [Finding(origin.where(location), text) for location, text in ordered]


def _domain_problems(workflow: Workflow) -> Iterator[Problem]:
    if workflow.store is not None and not Path(workflow.store).is_dir():
        yield ("store",), f"no folder {workflow.store}; expected a folder of offset files"
    known = sorted({*workflow.domains, *_stored(workflow)})
    listing = f"declared domains: {', '.join(known)}" if known else "no domain is declared under 'domains'"
    for domain, location, user in _used_domains(workflow):
        if domain not in known:
            yield location, f"unknown domain {domain!r} of {user}; {listing}{nearest_hint(domain, known)}"


def _used_domains(workflow: Workflow) -> Iterator[tuple[str, Location, str]]:
    """Yield (domain, its place in the workflow, who has it), where agents and routes name one."""
    for name, agent in workflow.agents.items():
        if agent.domain is not None:
            yield agent.domain, ("agents", name, "domain"), f"agent {name!r}"
    for index, edge in enumerate(workflow.edges):
        for domain in edge.domains:
            yield domain, ("edges", index, "targets", domain), f"the route from {' and '.join(edge.source)}"


def _agent_problems(workflow: Workflow) -> Iterator[Problem]:
    sources = {source for edge in workflow.edges for source in edge.source}
    for name, agent in workflow.agents.items():
        here: Location = ("agents", name)
        if name in (START, END):
            yield here, f"{name} is the name of the workflow's own {name.lower()}; give the agent another name"
            continue
        for index, read in enumerate(agent.reads or ()):
            if read not in workflow.agents and read != START:
                yield (*here, "reads", index), f"agent {name!r} reads {_unknown(read, workflow, START)}"
        for index, target in enumerate(agent.handoffs):
            if target not in workflow.agents and target != END:
                yield (*here, "handoffs", index), f"handoff of agent {name!r} to {_unknown(target, workflow, END)}"
        if agent.handoffs and name in sources:
            yield (
                (*here, "handoffs"),
                f"agent {name!r} has handoffs and an outgoing edge; it needs one or the other "
                "(with handoffs it goes on to whom it names, and to END where it names nobody)",
            )
        if not agent.handoffs and name not in sources:
            yield here, f"agent {name!r} has no outgoing edge; add {{source: {name}, target: END}} or handoffs"


def _edge_problems(workflow: Workflow) -> Iterator[Problem]:
    seen: dict[tuple[str, ...], int] = {}
    for index, edge in enumerate(workflow.edges):
        here: Location = ("edges", index)
        yield from (((*here, key), text) for key, text in _end_problems(edge, workflow))
        yield from ((here, text) for text in _shape_problems(edge))
        for key in _edge_keys(edge):
            if key in seen:
                first = workflow.origin.where(("edges", seen[key]))
                yield here, f"the edge from {' and '.join(key[:-1])} to {key[-1]} is there twice (first: {first})"
            seen.setdefault(key, index)
        if edge.path is not None and edge.path != REPLY_CONTAINS:
            try:
                path_function(edge.path, workflow.origin.folder)
            except WorkflowError as error:
                yield (*here, "path"), str(error)


def _end_problems(edge: Edge, workflow: Workflow) -> Iterator[tuple[str, str]]:
    for source in edge.source:
        if source == END:
            yield "source", "END cannot be the source of an edge: nothing follows it"
        elif source not in workflow.agents and source != START:
            yield "source", f"edge from {_unknown(source, workflow, START)}"
    key = "targets" if edge.conditional else "target"
    for target in edge.ends:
        if target == START:
            yield key, "START cannot be the target of an edge; name the first agent to start again"
        elif target not in workflow.agents and target != END:
            yield key, f"edge to {_unknown(target, workflow, END)}"


def _shape_problems(edge: Edge) -> Iterator[str]:
    if len(edge.source) > 1 and START in edge.source:
        yield "START cannot be waited for together with agents; leave it out of the list"
    if len(edge.source) > 1 and edge.conditional:
        yield f"an edge with {'route' if edge.route else 'path'!r} has one source; write one edge for each"
    if edge.route and ANY not in (edge.targets or {}):
        yield f"'route' needs a target for {ANY!r}, taken where no domain leads by the margin, and without any text"
    if edge.route and len(edge.domains) < 2:
        yield f"'route' needs two or more domains as keys of 'targets' to choose from; found {len(edge.domains)}"
    if edge.path == REPLY_CONTAINS and any(not key.strip() for key in edge.targets or {}):
        yield f"{REPLY_CONTAINS!r} has a target with an empty key; name the words to look for, or {ANY!r}"
    if edge.path == REPLY_CONTAINS and ANY not in (edge.targets or {}):
        yield f"{REPLY_CONTAINS!r} needs a target for {ANY!r}, taken where no other key is found in the reply"


def _edge_keys(edge: Edge) -> list[tuple[str, ...]]:
    """What makes two edges the same: plain ones by source and target, conditional ones by source and path."""
    sources = tuple(sorted(edge.source))
    ends = [f"route {edge.route}" if edge.route else f"path {edge.path}"] if edge.conditional else edge.ends
    return [(*sources, end) for end in ends]


def _flow_problems(workflow: Workflow) -> Iterator[Problem]:
    follows = choices(workflow)
    if START not in follows:
        first = next(iter(workflow.agents))
        yield ("edges",), f"no edge starts at START, so nothing would run; add {{source: START, target: {first}}}"
    else:
        reached = reachable(START, follows)
        for name in workflow.agents:
            if name not in reached:
                yield ("agents", name), f"agent {name!r} is unreachable: no way from START leads to it"
    for cycle in endless_cycles(follows):
        indices = [i for i, e in enumerate(workflow.edges) if {*e.source} & {*cycle} and {*e.ends} & {*cycle}]
        location: Location = ("edges", indices[0]) if indices else ("agents", cycle[0])
        yield (
            location,
            f"{' -> '.join(cycle)} is a cycle without an exit: no run could leave it. Add an edge with 'path' and "
            "'targets' (or handoffs) that may lead to END or to an agent outside the cycle",
        )


def _join_problems(workflow: Workflow) -> Iterator[Problem]:
    for index, node in joins_behind_choice(workflow):
        edge = workflow.edges[index]
        waiting, waited = " and ".join(edge.ends), " and ".join(edge.source)
        alone = ", ".join(f"{{source: {source}, target: {edge.ends[0]}}}" for source in edge.source)
        yield (
            ("edges", index),
            f"{waiting} waits for {waited}, but {node} goes on to only one of its targets, so they never all run "
            f"and {waiting} never would; write one edge for each: {alone}",
        )


def _offset_problems(workflow: Workflow) -> Iterator[Problem]:
    for domain, location, path in _offset_files(workflow):
        try:
            offset = DomainOffset.load(path)
        except OffsetError as error:
            yield location, f"domain {domain!r}: {error}"
            continue
        if offset.prompt_format != "chat":
            yield (
                location,
                f"the offset of domain {domain!r} was trained in prompt format {offset.prompt_format!r}, but agents "
                f"chat; train it with 'offset-runtime train {domain} --format chat'",
            )


def _offset_files(workflow: Workflow) -> Iterator[tuple[str, Location, Path]]:
    """Yield (domain, its place in the workflow, its file): all that are declared, and those of the store in use."""
    for domain, path in workflow.domains.items():
        yield domain, ("domains", domain), Path(path)
    stored = _stored(workflow)
    for domain, location, _ in _used_domains(workflow):
        if workflow.store is not None and domain in stored and domain not in workflow.domains:
            yield domain, location, OffsetStore(workflow.store).path(domain)


def _template_problems(workflow: Workflow, runtime: OffsetRuntime) -> Iterator[Problem]:
    if not runtime.backend.tokenizer.has_chat_template:
        yield (
            ("model", "base"),
            f"{workflow.model.base} has no chat template, and agents speak in chats; choose a model that is tuned for "
            "chat or instructions",
        )


def _context_problems(workflow: Workflow, runtime: OffsetRuntime) -> Iterator[Problem]:
    context = runtime.backend.capabilities.context_tokens
    for name, agent in workflow.agents.items():
        wanted = SamplingParams().max_tokens if agent.max_tokens is None else agent.max_tokens
        if wanted >= context:
            yield (
                ("agents", name, "max_tokens"),
                f"max_tokens of agent {name!r} is {wanted}, which leaves no room for a prompt in the context of "
                f"{context} tokens of {workflow.model.base}; lower it",
            )


def _stored(workflow: Workflow) -> list[str]:
    return [] if workflow.store is None else OffsetStore(workflow.store).domains()


def _unknown(name: str, workflow: Workflow, also: str) -> str:
    known = [*workflow.agents, also]
    return f"unknown agent {name!r}; expected one of {', '.join(known)}{nearest_hint(name, known)}"

"""From a workflow to a LangGraph graph."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from langgraph.constants import END as GRAPH_END
from langgraph.constants import START as GRAPH_START
from langgraph.graph import MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from offset_runtime.agents import ChatOffset, DomainRouter, RoutedState, agent_node, retry_policy
from offset_runtime.agents.sampling_fields import SAMPLING_FIELDS
from offset_runtime.graphs.check import find_problems
from offset_runtime.graphs.findings import raise_findings
from offset_runtime.graphs.flow import upcoming
from offset_runtime.graphs.history import history
from offset_runtime.graphs.loader import load_workflow
from offset_runtime.graphs.routing import edge_router, handoff_instruction, handoff_route
from offset_runtime.graphs.schema import END, START, Agent, Edge, Origin, Workflow
from offset_runtime.offset import DomainOffset
from offset_runtime.runtime import OffsetRuntime

if TYPE_CHECKING:
    from langgraph.checkpoint.base import BaseCheckpointSaver

WorkflowGraph = CompiledStateGraph[MessagesState, None, MessagesState, MessagesState]

# No agent's name has a full stop.
ROUTE = "route."

_GRAPH_NAMES = {START: GRAPH_START, END: GRAPH_END}


def build_graph(
    workflow: Workflow,
    *,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
    runtime: OffsetRuntime | None = None,
) -> WorkflowGraph:
    """Build the graph of `workflow`: a node for each agent, under its name, over ``messages``.

    An edge with `route` is a node of its own, named as its source with `ROUTE` before it. What it found is in the
    state, under ``routes`` and the source's name, as in `RoutedState`.

    The base model is loaded by the first reply, not here. `runtime` runs all agents on a loaded base
    instead of the one this process shares. A node that fails for want of room (`RetryableError`) is run up to twice
    more. Raises `WorkflowError` with everything that is wrong.
    """
    raise_findings(find_problems(workflow, files=False))
    graph = StateGraph[Any, None, Any, Any](RoutedState if any(e.route for e in workflow.edges) else MessagesState)
    for name, agent in workflow.agents.items():
        ends = tuple(_graph_name(target) for target in (*agent.handoffs, END)) if agent.handoffs else None
        graph.add_node(
            name,
            _node(workflow, name, agent, runtime),
            metadata={"domain": agent.domain},
            destinations=ends,
            retry_policy=retry_policy(),
        )
    for index, edge in enumerate(workflow.edges):
        if edge.route:
            _add_route(graph, workflow, edge, runtime)
        else:
            _add_edge(graph, edge, workflow.origin, index)
    compiled = graph.compile(checkpointer=checkpointer, name=workflow.name)
    # LangGraph's own number of threads goes by the machine's cores, and parallel agents beyond it would wait for others
    # instead of sharing their batch. Two more: one waits for what is streamed, one writes checkpoints.
    return compiled.with_config(max_concurrency=len(graph.nodes) + 2)


def make_graph(
    path: str | os.PathLike[str],
    *,
    checkpointer: BaseCheckpointSaver[Any] | None = None,
    runtime: OffsetRuntime | None = None,
) -> WorkflowGraph:
    """Read a workflow file and build its graph; loads no model.

    For ``langgraph.json``, write a file ``graph.py`` beside the workflow with ::

        graph = make_graph(Path(__file__).with_name("workflow.yaml"))

    and refer to it as ``./graph.py:graph``. A factory works too: a function there that takes a
    ``RunnableConfig`` and returns ``make_graph(...)``. Under ``langgraph dev`` leave `checkpointer`
    out: the server brings its own.

    Raises `WorkflowError` as `load_workflow` does.
    """
    return build_graph(load_workflow(path), checkpointer=checkpointer, runtime=runtime)


def chat_model(workflow: Workflow, agent: Agent, runtime: OffsetRuntime | None = None) -> ChatOffset:
    """The chat model of one agent: the workflow's base under the agent's domain and settings."""
    settings: dict[str, Any] = {key: getattr(agent, key) for key in SAMPLING_FIELDS if getattr(agent, key) is not None}
    if agent.stop is not None:
        settings["stop"] = list(agent.stop)
    if agent.timeout_s is not None:
        settings["timeout"] = agent.timeout_s
    if workflow.store is not None:
        settings["store"] = workflow.store
    spec = workflow.model.spec()
    return ChatOffset(
        model=spec.base,
        backend=spec.backend,
        dtype=spec.dtype,
        device=spec.device,
        llama_cpp=spec.llama_cpp,
        domain=agent.domain,
        strength=agent.strength,
        domains=dict(workflow.domains),
        runtime=runtime,
        **settings,
    )


def agent_offsets(workflow: Workflow, runtime: OffsetRuntime | None = None) -> dict[str, DomainOffset | None]:
    """The offset each agent speaks under, at the agent's strength, by agent."""
    found = {name: chat_model(workflow, agent, runtime).offset() for name, agent in workflow.agents.items()}
    return {
        name: None if offset is None else offset.scaled(workflow.agents[name].strength)
        for name, offset in found.items()
    }


def _node(workflow: Workflow, name: str, agent: Agent, runtime: OffsetRuntime | None) -> Any:
    return agent_node(
        name,
        chat_model(workflow, agent, runtime),
        system_prompt=instructions(workflow, agent),
        reads=agent.reads,
        route=handoff_route(name, agent.handoffs) if agent.handoffs else None,
        history=history(workflow),
        upcoming=upcoming(workflow, name),
    )


def instructions(workflow: Workflow, agent: Agent) -> str:
    """What an agent is told: its system prompt, and whom it may hand over to."""
    if not agent.handoffs:
        return agent.system_prompt
    return f"{agent.system_prompt}\n\n{handoff_instruction(workflow.agents, agent.handoffs)}".lstrip()


def _add_route(
    graph: StateGraph[Any, None, Any, Any], workflow: Workflow, edge: Edge, runtime: OffsetRuntime | None
) -> None:
    assert edge.targets is not None
    [source] = edge.source
    # An edge cannot write into the state, so a node between the two scores.
    router = DomainRouter(chat_model(workflow, Agent(), runtime), edge.domains, margin=edge.margin or 0.0)
    targets = {key: _graph_name(target) for key, target in edge.targets.items()}
    graph.add_node(
        ROUTE + source,
        router.node(source, targets),
        destinations=tuple(dict.fromkeys(targets.values())),
        retry_policy=retry_policy(),
    )
    graph.add_edge(_graph_name(source), ROUTE + source)


def _add_edge(graph: StateGraph[Any, None, Any, Any], edge: Edge, origin: Origin, index: int) -> None:
    sources = [_graph_name(source) for source in edge.source]
    if edge.targets is not None:
        ends: dict[Any, str] = {key: _graph_name(target) for key, target in edge.targets.items()}
        where = origin.where(("edges", index, "path"))
        graph.add_conditional_edges(sources[0], edge_router(edge, origin.folder, where=where), ends)
        return
    for target in edge.ends:
        graph.add_edge(sources if len(sources) > 1 else sources[0], _graph_name(target))


def _graph_name(name: str) -> str:
    return _GRAPH_NAMES.get(name, name)

"""Workflows of agents, declared in YAML and run as LangGraph graphs."""

from offset_runtime.graphs.builder import WorkflowGraph, build_graph, make_graph
from offset_runtime.graphs.checkpoints import sqlite_checkpoints
from offset_runtime.graphs.events import (
    AgentFinished,
    AgentStarted,
    AgentToken,
    RouteChosen,
    WorkflowEvent,
    WorkflowFinished,
    event_record,
)
from offset_runtime.graphs.loader import load_workflow
from offset_runtime.graphs.runner import run_workflow
from offset_runtime.graphs.schema import Agent, Edge, Workflow
from offset_runtime.graphs.terminal import show_events, turns_table
from offset_runtime.graphs.warm import warm_up

__all__ = [
    "Agent",
    "AgentFinished",
    "AgentStarted",
    "AgentToken",
    "Edge",
    "RouteChosen",
    "Workflow",
    "WorkflowEvent",
    "WorkflowFinished",
    "WorkflowGraph",
    "build_graph",
    "event_record",
    "load_workflow",
    "make_graph",
    "run_workflow",
    "show_events",
    "sqlite_checkpoints",
    "turns_table",
    "warm_up",
]

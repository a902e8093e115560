"""The workflow of this folder as a graph that `langgraph dev` serves; nothing is loaded before the first run."""

from pathlib import Path

from offset_runtime.graphs import make_graph

graph = make_graph(Path(__file__).with_name("workflow.yaml"))

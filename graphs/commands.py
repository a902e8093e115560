"""The commands `run` and `graph`."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver

from offset_runtime.chat import check_text
from offset_runtime.errors import InvalidRequestError
from offset_runtime.graphs.builder import WorkflowGraph, agent_offsets, build_graph
from offset_runtime.graphs.check import find_model_problems, find_problems
from offset_runtime.graphs.checkpoints import sqlite_checkpoints
from offset_runtime.graphs.findings import raise_findings
from offset_runtime.graphs.history import history
from offset_runtime.graphs.loader import load_workflow, read_workflow
from offset_runtime.graphs.runner import run_workflow
from offset_runtime.graphs.saved_state import SavedState
from offset_runtime.graphs.schema import Workflow
from offset_runtime.graphs.terminal import memory_line, show_events
from offset_runtime.graphs.warm import warm_up
from offset_runtime.models import chosen_backend
from offset_runtime.runtime import OffsetRuntime
from offset_runtime.shared import shared_runtimes
from offset_runtime.state_folder import DEFAULT_MAX_BYTES, StateFolder
from offset_runtime.terminal import messages, output, quiet_libraries, spinner

graph_app = typer.Typer(
    help="Check and draw workflow files.", no_args_is_help=True, add_completion=False, rich_markup_mode="rich"
)

_DEFAULT_THREAD = "default"

WorkflowPath = Annotated[Path, typer.Argument(metavar="WORKFLOW", help="Workflow file in YAML.")]
Text = Annotated[str | None, typer.Argument(metavar="INPUT", help="What the user says. Not with --resume.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line for each event.")]
Checkpoint = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Keep the state in this SQLite file after each agent.")
]
Thread = Annotated[
    str, typer.Option(metavar="ID", help="Conversation in the checkpoint file; it goes on where it was.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run, from --checkpoint FILE.")]
KVDir = Annotated[
    str | None,
    typer.Option(
        "--kv-dir",
        metavar="DIR",
        help="Keep what the model has read in this folder, and do not read again what an earlier run left there.",
    ),
]
KVMaxMb = Annotated[
    int | None,
    typer.Option(
        "--kv-max-mb",
        metavar="MB",
        min=1,
        help=f"Most that --kv-dir may take, {DEFAULT_MAX_BYTES // 10**6} if left out; the oldest goes first.",
    ),
]
Load = Annotated[bool, typer.Option("--load", help="Load the base model too, and check that the agents fit it.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="A .mmd, .png, .svg or .pdf file; without it, Mermaid text."),
]


def run(
    workflow: WorkflowPath,
    text: Text = None,
    as_json: AsJson = False,
    checkpoint: Checkpoint = None,
    thread: Thread = _DEFAULT_THREAD,
    resume: Resume = False,
    kv_dir: KVDir = None,
    kv_max_mb: KVMaxMb = None,
) -> None:
    """Run a workflow on INPUT, showing each agent's reply as it is written.

    [bold]Example[/bold]: offset-runtime run workflow.yaml "The harbour was closed on Monday after a storm."
    """
    _check_input(text, checkpoint, resume)
    loaded = load_workflow(workflow)
    folder = _state_folder(kv_dir, kv_max_mb)
    config: RunnableConfig = {"configurable": {"thread_id": thread}}
    with _checkpoints(checkpoint) as saver:
        runtime = _load(loaded)
        graph = build_graph(loaded, checkpointer=saver, runtime=runtime)
        offsets = agent_offsets(loaded, runtime)
        if saver is not None and not resume:
            _say_if_continued(graph, config)
        with SavedState(runtime, folder) as saved:
            warm_up(loaded, runtime, thread=thread, steps_away=2)
            # Closed before the checkpoint is read: until then agents go on.
            with _hint_at_resume(graph, config), contextlib.closing(run_workflow(graph, text, config=config)) as events:
                show_events(events, offsets=offsets, console=output(), as_json=as_json)
    if not as_json:
        for line in filter(None, (memory_line(runtime, offsets), saved.line)):
            output().print(line, style="dim", soft_wrap=True)


@graph_app.command()
def check(workflow: WorkflowPath, load: Load = False) -> None:
    """Report everything that is wrong with a workflow file.

    [bold]Example[/bold]: offset-runtime graph check workflow.yaml --load
    """
    loaded = load_workflow(workflow)
    fit = ""
    if load:
        _load(loaded)
        fit = f"; all offsets fit {loaded.model.base}"
    typer.echo(
        f"{workflow}: no problems in {len(loaded.agents)} agents, {len(loaded.domains)} domains and "
        f"{len(loaded.edges)} edges; history: {history(loaded)}{'' if loaded.history else ' (by its pattern)'}{fit}"
    )


@graph_app.command()
def draw(workflow: WorkflowPath, target: Output = None) -> None:
    """Draw a workflow: Mermaid text on the standard output, or a picture in a file.

    [bold]Example[/bold]: offset-runtime graph draw workflow.yaml --output workflow.png
    """
    from offset_runtime.graphs.drawing import mermaid, save_drawing

    loaded = read_workflow(workflow)
    # A drawing needs no offsets: it may be wanted before they are trained.
    raise_findings(find_problems(loaded, files=False))
    if target is None:
        typer.echo(mermaid(loaded), nl=False)
    else:
        save_drawing(loaded, target)
        typer.echo(f"wrote {target}")


def _say_if_continued(graph: WorkflowGraph, config: RunnableConfig) -> None:
    """Agents read what the thread already holds, which a user who only wanted a checkpoint may not expect."""
    held = graph.get_state(config).values.get("messages", [])
    if held:
        thread = config["configurable"]["thread_id"]
        messages().print(
            f"continuing thread {thread!r}, which holds {len(held)} messages; another --thread starts afresh",
            soft_wrap=True,
        )


def _check_input(text: str | None, checkpoint: Path | None, resume: bool) -> None:
    if resume and checkpoint is None:
        raise InvalidRequestError("--resume needs --checkpoint FILE, the file the interrupted run was started with")
    if resume and text is not None:
        raise InvalidRequestError("--resume goes on with the input of the interrupted run; leave INPUT out")
    if not resume and not (text or "").strip():
        raise InvalidRequestError('the workflow has no input; add it after the file: run WORKFLOW "what the user says"')
    check_text(text or "")


def _state_folder(kv_dir: str | None, kv_max_mb: int | None) -> StateFolder | None:
    if kv_dir is None:
        if kv_max_mb is not None:
            raise InvalidRequestError("--kv-max-mb bounds what --kv-dir keeps; give --kv-dir DIR too")
        return None
    if not kv_dir:
        # As a path it would be the current folder.
        raise InvalidRequestError("--kv-dir is empty; give a folder (is a variable of the shell unset?)")
    return StateFolder(kv_dir, DEFAULT_MAX_BYTES if kv_max_mb is None else kv_max_mb * 10**6)


@contextlib.contextmanager
def _checkpoints(file: Path | None) -> Iterator[BaseCheckpointSaver[str] | None]:
    if file is None:
        yield None
        return
    with sqlite_checkpoints(file) as saver:
        yield saver


@contextlib.contextmanager
def _hint_at_resume(graph: WorkflowGraph, config: RunnableConfig) -> Iterator[None]:
    """After an interrupt, say how to go on, where that is possible."""
    try:
        yield
    except KeyboardInterrupt:
        if graph.checkpointer and graph.get_state(config).next:
            _say_how_to_resume(config["configurable"]["thread_id"])
        raise


def _say_how_to_resume(thread: str) -> None:
    options = "--resume" if thread == _DEFAULT_THREAD else f"--resume --thread {shlex.quote(thread)}"
    messages().print(
        f"to go on, run the same command with {options} in place of the input", markup=False, soft_wrap=True
    )


def _load(workflow: Workflow) -> OffsetRuntime:
    """Load the base model, and check every offset on it before the first agent speaks."""
    spec = workflow.model.spec()
    with spinner(f"loading {spec.base}"):
        if chosen_backend(spec) == "torch":
            quiet_libraries()
        runtime = shared_runtimes.get(spec)
    raise_findings(find_model_problems(workflow, runtime))
    return runtime

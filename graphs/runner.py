"""Running a workflow and seeing what its agents do."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs
from langgraph.errors import GraphRecursionError
from langgraph.graph import END

from offset_runtime.errors import WorkflowError
from offset_runtime.graphs.builder import WorkflowGraph
from offset_runtime.graphs.events import (
    AgentFinished,
    AgentStarted,
    AgentToken,
    RouteChosen,
    WorkflowEvent,
    WorkflowFinished,
)
from offset_runtime.request import Timings, Usage

# LangGraph's own limit is 10,007 steps, which on a local model is days of two agents going round.
STEP_LIMIT = 100


def run_workflow(
    graph: WorkflowGraph, text: str | None, *, config: RunnableConfig | None = None
) -> Generator[WorkflowEvent, None, None]:
    """Run `graph` on the user's `text`, and yield what happens as it happens.

    `text` None resumes the thread that `config` names from the graph's checkpointer: agents that had
    finished do not run again. A workflow that has not ended after 100 steps is stopped, unless `config`
    has another ``recursion_limit``. Leaving the loop early, Ctrl-C included, cancels the replies that
    are being written, at their next token.

    Raises `WorkflowError` where there is nothing to resume, where `text` meets a thread whose run was
    interrupted, where the steps run out, and where an agent is left waiting for others at the end; and
    what agents raise.
    """
    settings: RunnableConfig = {"recursion_limit": STEP_LIMIT, **(config or {})}
    _check_thread(graph, settings, resume=text is None)
    return _events(_Run(graph, text, settings))


def _events(run: _Run) -> Generator[WorkflowEvent, None, None]:
    started, turns = time.monotonic(), list[Usage]()
    with run:
        for event in run:
            if isinstance(event, AgentFinished):
                turns.append(event.usage)
            yield event
        run.check_joins()
    yield WorkflowFinished(
        len(turns),
        time.monotonic() - started,
        sum(usage.prompt_tokens for usage in turns),
        sum(usage.cached_tokens for usage in turns),
    )


class _Left(BaseException):
    """The reader has left. No `Exception`, so that nothing on the way takes it for a failure of the model."""


class _Watch(BaseCallbackHandler):
    """Tells of each turn that begins, and stops replies at their next token once `left` is set."""

    raise_error = True
    run_inline = True

    def __init__(self, tell: Callable[[AgentStarted], None]) -> None:
        self.left = threading.Event()
        self._tell = tell

    def on_chat_model_start(
        self, serialized: Any, messages: Any, *, metadata: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self._check()
        if metadata is not None and "langgraph_node" in metadata:
            self._tell(AgentStarted(metadata["langgraph_node"], metadata.get("domain")))

    def on_llm_new_token(self, *args: Any, **kwargs: Any) -> None:
        self._check()

    def _check(self) -> None:
        if self.left.is_set():
            raise _Left


class _Joins:
    """Which agents that wait for several others have been left waiting."""

    def __init__(self, graph: WorkflowGraph) -> None:
        self._graph = graph
        edges = [(sources, target) for sources, target in graph.builder.waiting_edges if target != END]
        self._arrived: dict[tuple[tuple[str, ...], str], set[str]] = {edge: set() for edge in sorted(edges)}

    def note(self, task: dict[str, Any]) -> None:
        if "result" not in task:
            return
        for (sources, _), arrived in self._arrived.items():
            arrived.update({task["name"]} & {*sources})
            if len(arrived) == len(set(sources)):
                arrived.clear()

    def waiting(self, config: RunnableConfig) -> Iterator[tuple[str, list[str]]]:
        """Yield (the agent that waits, those it has not heard of)."""
        for (sources, target), arrived in self._arrived.items():
            known = self._recorded(sources, target, config) if self._recording(config) else arrived
            if known and (missing := [source for source in sources if source not in known]):
                yield target, missing

    def _recording(self, config: RunnableConfig) -> bool:
        return bool(self._graph.checkpointer) and "thread_id" in config.get("configurable", {})

    def _recorded(self, sources: tuple[str, ...], target: str, config: RunnableConfig) -> set[str]:
        """As the checkpoint has it, which knows of those too that had arrived before the run was resumed."""
        saver: Any = self._graph.checkpointer
        saved = saver.get_tuple(config)
        return (
            set()
            if saved is None
            else saved.checkpoint["channel_values"].get(f"join:{'+'.join(sources)}:{target}") or set()
        )


class _Run:
    """The graph's own stream, run by a thread of its own.

    LangGraph waits for the threads of its nodes whatever interrupts it. Here an interrupt meets the
    reader instead, who then has the nodes stop.
    """

    def __init__(self, graph: WorkflowGraph, text: str | None, config: RunnableConfig) -> None:
        self._graph = graph
        self._input: Any = None if text is None else {"messages": [HumanMessage(text)]}
        self._joins = _Joins(graph)
        self._found: queue.SimpleQueue[WorkflowEvent | BaseException | None] = queue.SimpleQueue()
        self._watch = _Watch(self._found.put)
        self._config = merge_configs(config, {"callbacks": [self._watch]})
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._work,), name="offset-runtime-workflow")

    def __enter__(self) -> _Run:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.left.set()
        self._thread.join()

    def __iter__(self) -> Iterator[WorkflowEvent]:
        while (found := self._found.get()) is not None:
            if isinstance(found, GraphRecursionError):
                limit = self._config.get("recursion_limit")
                raise WorkflowError(
                    f"workflow {self._graph.name!r} did not reach END within {limit} steps; its agents may be going "
                    "round in a cycle. Change the prompts or edges, or set a higher recursion_limit in the config."
                ) from found
            if isinstance(found, BaseException):
                raise found
            yield found

    def check_joins(self) -> None:
        """Raise `WorkflowError` where an agent still waits for others: the run has ended without it."""
        for target, missing in self._joins.waiting(self._config):
            raise WorkflowError(
                f"workflow {self._graph.name!r} ended while {target!r} still waited for {', '.join(missing)}, which "
                "did not run; if not all of them always run, write one edge for each in place of the list"
            )

    def _work(self) -> None:
        try:
            # A killed process must find on disk whatever its reader has seen finished.
            durability: Any = "sync" if self._graph.checkpointer else None
            modes: Any = ["messages", "tasks"]
            found: Any = self._graph.stream(self._input, self._config, stream_mode=modes, durability=durability)
            for mode, data in found:
                if mode == "tasks":
                    self._joins.note(data)
                event = _token(data) if mode == "messages" else _finished(data)
                if event is not None:
                    self._found.put(event)
            self._found.put(None)
        except _Left:
            self._found.put(None)
        except BaseException as error:
            self._found.put(error)


def _check_thread(graph: WorkflowGraph, config: RunnableConfig, *, resume: bool) -> None:
    """Refuse to resume nothing, and to begin anew where a run was interrupted."""
    thread = config.get("configurable", {}).get("thread_id")
    if not graph.checkpointer or thread is None:
        if resume:
            raise WorkflowError("nothing to resume: resuming needs a checkpointer and the id of a thread")
        return
    state = graph.get_state(config)
    if resume and not state.values:
        raise WorkflowError(f"nothing to resume: there is no thread {thread!r} in the checkpoints")
    if resume and not state.next:
        raise WorkflowError(f"nothing to resume: the workflow of thread {thread!r} has reached its end")
    if not resume and state.next:
        raise WorkflowError(
            f"thread {thread!r} holds an interrupted run that would go on with {', '.join(state.next)}; "
            "resume it (--resume), or name another thread (--thread)"
        )


def _token(data: tuple[Any, dict[str, Any]]) -> AgentToken | None:
    message, metadata = data
    # Whole messages come too, for replies that were not streamed; `AgentFinished` has those.
    if not isinstance(message, AIMessageChunk) or not message.text:
        return None
    return AgentToken(metadata["langgraph_node"], metadata.get("domain"), str(message.text))


def _finished(task: dict[str, Any]) -> AgentFinished | RouteChosen | None:
    # The same mode tells of tasks that begin, among them those whose outcome a checkpoint has.
    if not task.get("result"):
        return None
    if "routes" in task["result"]:
        [(source, found)] = task["result"]["routes"].items()
        return RouteChosen(source, found["route"], found["scores"])
    reply = task["result"]["messages"][-1]
    told, tokens = reply.response_metadata, reply.usage_metadata
    cached_tokens = tokens.get("input_token_details", {}).get("cache_read", 0)
    return AgentFinished(
        str(task["name"]),
        told["domain"],
        str(reply.text),
        told["finish_reason"],
        Usage(tokens["input_tokens"], tokens["output_tokens"], cached_tokens),
        Timings(**told["timings"]),
    )

"""Running a workflow: its events, leaving it, and resuming it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langgraph.checkpoint.memory import InMemorySaver

from offset_runtime import OffsetRuntime
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.errors import ContextOverflowError, OffsetError, WorkflowError
from offset_runtime.graphs import (
    AgentFinished,
    AgentStarted,
    AgentToken,
    Workflow,
    WorkflowFinished,
    build_graph,
    event_record,
    make_graph,
    run_workflow,
    sqlite_checkpoints,
)

Write = Callable[[str], Path]
THREAD: Any = {"configurable": {"thread_id": "t"}}


def chain(*agents: str, **settings: Any) -> Workflow:
    names = ["START", *agents, "END"]
    return Workflow.model_validate(
        {
            "version": 1,
            "name": "chain",
            "model": {"base": "fake"},
            "agents": dict.fromkeys(agents, settings),
            "edges": [{"source": a, "target": b} for a, b in pairwise(names)],
        }
    )


def test_events_come_in_order_and_their_tokens_make_up_the_reply(
    write_workflow: Write, save_offset: Callable[..., Path], fake_runtime: OffsetRuntime
) -> None:
    save_offset("news")
    path = write_workflow("""
        version: 1
        name: one
        model: {base: fake}
        domains: {news: offsets/news.safetensors}
        agents: {a: {domain: news, max_tokens: 6}}
        edges: [{source: START, target: a}, {source: a, target: END}]
    """)
    started, *tokens, finished, end = run_workflow(make_graph(path, runtime=fake_runtime), "hello")
    assert started == AgentStarted("a", "news")
    assert isinstance(finished, AgentFinished)
    assert isinstance(end, WorkflowFinished)
    texts = [token.text for token in tokens if isinstance(token, AgentToken)]
    assert len(texts) == len(tokens) == 6, "one event a token"
    assert (finished.agent, finished.domain, finished.reply) == ("a", "news", "".join(texts))
    assert (finished.finish_reason, finished.usage.output_tokens) == ("length", 6)
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert finished.usage.prompt_tokens == len(fake_runtime.backend.tokenizer.encode(prompt))
    assert end.turns == 1


def test_an_agent_that_speaks_twice_has_two_turns(scripted: Callable[..., OffsetRuntime]) -> None:
    workflow = Workflow.model_validate(
        {
            "version": 1,
            "name": "loop",
            "model": {"base": "fake"},
            "agents": {"a": {}, "b": {"system_prompt": "Judge."}},
            "edges": [
                {"source": "START", "target": "a"},
                {"source": "a", "target": "b"},
                {"source": "b", "path": "reply_contains", "targets": {"again": "a", "*": "END"}},
            ],
        }
    )
    runtime = scripted({"b:\nagain": "fine", "a:": "again"})
    events = run_workflow(build_graph(workflow, runtime=runtime), "hello")
    assert [e.agent for e in events if isinstance(e, AgentFinished)] == ["a", "b", "a", "b"]


def run_by_workflow(graph: Any) -> list[str]:
    return [e.agent for e in run_workflow(graph, "hello") if isinstance(e, AgentFinished)]


def run_by_langgraph(graph: Any) -> list[str]:
    parts = graph.stream({"messages": [("user", "hello")]}, stream_mode="messages")
    return [metadata["agent"] for message, metadata in parts if message.content]


@pytest.mark.parametrize("run", [run_by_workflow, run_by_langgraph])
def test_more_parallel_agents_than_the_machine_has_threads_share_one_batch(
    watched: Any, run: Callable[[Any], list[str]]
) -> None:
    # LangGraph's own executor has at most 32, on any machine.
    names = [f"a{number}" for number in range(40)]
    runtime = watched(expected=len(names))
    made = Workflow.model_validate(
        {
            "version": 1,
            "name": "fan",
            "model": {"base": "fake"},
            "agents": {name: {"max_tokens": 1} for name in names},
            "edges": [{"source": "START", "target": names}, *({"source": name, "target": "END"} for name in names)],
        }
    )

    assert sorted(run(build_graph(made, runtime=runtime))) == sorted(names)


def test_an_event_is_a_json_record() -> None:
    assert event_record(AgentToken("a", None, "x")) == {
        "event": "agent_token",
        "agent": "a",
        "domain": None,
        "text": "x",
    }
    assert event_record(WorkflowFinished(2, 0.5, 30, 10)) == {
        "event": "workflow_finished",
        "turns": 2,
        "elapsed_s": 0.5,
        "prompt_tokens": 30,
        "cached_tokens": 10,
    }


class CountingBackend(FakeBackend):
    """Counts passes, and waits from the tenth on until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = 0
        self.may_go_on = threading.Event()

    def forward(self, chunks: Any) -> Any:
        self.passes += 1
        if self.passes >= 10:
            self.may_go_on.wait(20)
        return super().forward(chunks)


def run_to_first_token(runtime: OffsetRuntime, *agents: str) -> Generator[Any]:
    """Run agents with long replies until the first token; the engine is let go on a moment later."""
    backend: Any = runtime.backend
    graph = build_graph(chain(*agents, max_tokens=3000), runtime=runtime)
    events: Any = run_workflow(graph, "hello")
    next(event for event in events if isinstance(event, AgentToken))
    threading.Timer(0.2, backend.may_go_on.set).start()
    return events  # type: ignore[no-any-return]


def test_leaving_early_cancels_the_reply_and_the_agents_after_it() -> None:
    backend = CountingBackend()
    with OffsetRuntime(backend) as runtime:
        run_to_first_token(runtime, "a", "b").close()
        assert not [t for t in threading.enumerate() if t.name == "offset-runtime-workflow"]
    assert backend.passes < 1000
    assert backend.open_sequences == 0


def test_an_interrupt_cancels_too() -> None:
    backend = CountingBackend()
    with OffsetRuntime(backend) as runtime:
        events = run_to_first_token(runtime, "a")
        with pytest.raises(KeyboardInterrupt):
            events.throw(KeyboardInterrupt)
    assert backend.passes < 1000


def test_an_error_keeps_its_type_and_names_the_agent(fake_runtime: OffsetRuntime) -> None:
    graph = build_graph(chain("a", max_tokens=5000), runtime=fake_runtime)
    with pytest.raises(ContextOverflowError, match=r"^agent 'a': .* exceeds the context"):
        list(run_workflow(graph, "hello"))


def test_going_round_for_ever_is_stopped_with_a_message(scripted: Callable[..., OffsetRuntime]) -> None:
    workflow = Workflow.model_validate(
        {
            "version": 1,
            "name": "loop",
            "model": {"base": "fake"},
            "agents": {"a": {}},
            "edges": [
                {"source": "START", "target": "a"},
                {"source": "a", "path": "reply_contains", "targets": {"done": "END", "*": "a"}},
            ],
        }
    )
    graph = build_graph(workflow, runtime=scripted({}))
    with pytest.raises(WorkflowError, match="workflow 'loop' did not reach END within 4 steps"):
        list(run_workflow(graph, "hello", config={"recursion_limit": 4}))


def test_callbacks_of_the_config_are_kept(fake_runtime: OffsetRuntime) -> None:
    class Counter(BaseCallbackHandler):
        tokens = 0

        def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
            self.tokens += 1

    counter = Counter()
    graph = build_graph(chain("a", max_tokens=4), runtime=fake_runtime)
    list(run_workflow(graph, "hello", config={"callbacks": [counter]}))
    assert counter.tokens >= 4


def test_a_finished_thread_goes_on_as_a_conversation(scripted: Callable[..., OffsetRuntime]) -> None:
    runtime = scripted({"my name is Ada": "hello Ada"})
    graph = build_graph(chain("a"), checkpointer=InMemorySaver(), runtime=runtime)
    list(run_workflow(graph, "my name is Ada", config=THREAD))
    [reply] = [e.reply for e in run_workflow(graph, "who am I?", config=THREAD) if isinstance(e, AgentFinished)]
    assert reply == "hello Ada"


def test_a_failed_run_resumes_at_the_agent_that_failed(tmp_path: Path) -> None:
    class FailingOnce(FakeBackend):
        failed = False

        def forward(self, chunks: Any) -> Any:
            if not self.failed and self.asked_by_second(chunks):
                self.failed = True
                raise RuntimeError("the lights went out")
            return super().forward(chunks)

        def asked_by_second(self, chunks: Any) -> bool:
            return any("Second." in self.tokenizer.decode(chunk.token_ids) for chunk in chunks)

    workflow = chain("first", "second", max_tokens=4)
    second = workflow.agents["second"].model_copy(update={"system_prompt": "Second."})
    workflow = workflow.model_copy(update={"agents": {**workflow.agents, "second": second}})
    with OffsetRuntime(FailingOnce()) as runtime, sqlite_checkpoints(tmp_path / "c.sqlite") as saver:
        graph = build_graph(workflow, checkpointer=saver, runtime=runtime)
        with pytest.raises(OffsetError, match="the lights went out"):
            list(run_workflow(graph, "hello", config=THREAD))
        with pytest.raises(WorkflowError, match="holds an interrupted run that would go on with second"):
            run_workflow(graph, "hello again", config=THREAD)
        events = list(run_workflow(graph, None, config=THREAD))
    assert [e.agent for e in events if isinstance(e, AgentStarted | AgentFinished)] == ["second", "second"]


def test_resuming_nothing_is_an_error(fake_runtime: OffsetRuntime) -> None:
    graph = build_graph(chain("a", max_tokens=2), runtime=fake_runtime)
    with pytest.raises(WorkflowError, match="resuming needs a checkpointer"):
        run_workflow(graph, None, config=THREAD)
    graph = build_graph(chain("a", max_tokens=2), checkpointer=InMemorySaver(), runtime=fake_runtime)
    with pytest.raises(WorkflowError, match="no thread 't' in the checkpoints"):
        run_workflow(graph, None, config=THREAD)
    list(run_workflow(graph, "hello", config=THREAD))
    with pytest.raises(WorkflowError, match="thread 't' has reached its end"):
        run_workflow(graph, None, config=THREAD)


def test_a_checkpoint_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(OffsetError, match=r"cannot use checkpoint file .*nowhere.*unable to open"),
        sqlite_checkpoints(tmp_path / "nowhere" / "c.sqlite"),
    ):
        pass
    other = tmp_path / "text.txt"
    other.write_text("no database " * 100)
    with pytest.raises(OffsetError, match="file is not a database"), sqlite_checkpoints(other):
        pass


def test_without_the_extra_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langgraph.checkpoint.sqlite", None)
    with (
        pytest.raises(OffsetError, match=r"pip install 'offset-runtime\[sqlite\]'"),
        sqlite_checkpoints(tmp_path / "c"),
    ):
        pass


def join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> Workflow:
    """A split by a function that returns `body`, and c, which waits for both of its targets."""
    monkeypatch.delitem(sys.modules, "join_routes", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "join_routes.py").write_text(f"def pick(state):\n    return {body}\n")
    return Workflow.model_validate(
        {
            "version": 1,
            "name": "join",
            "model": {"base": "fake"},
            "agents": {name: {"max_tokens": 3} for name in "abc"},
            "edges": [
                {"source": "START", "path": "join_routes:pick", "targets": {"x": "a", "y": "b"}},
                {"source": ["a", "b"], "target": "c"},
                {"source": "c", "target": "END"},
            ],
        }
    )


@pytest.mark.parametrize("saver", [None, InMemorySaver])
def test_an_agent_left_waiting_at_the_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_runtime: OffsetRuntime, saver: type[InMemorySaver] | None
) -> None:
    workflow = join(tmp_path, monkeypatch, "'x'")
    graph = build_graph(workflow, runtime=fake_runtime, checkpointer=saver and saver())
    with pytest.raises(WorkflowError, match=r"workflow 'join' ended while 'c' still waited for b, which did not run"):
        list(run_workflow(graph, "hello", config=THREAD))


@pytest.mark.parametrize("saver", [None, InMemorySaver])
def test_a_join_whose_sources_all_ran_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_runtime: OffsetRuntime, saver: type[InMemorySaver] | None
) -> None:
    workflow = join(tmp_path, monkeypatch, "['x', 'y']")
    graph = build_graph(workflow, runtime=fake_runtime, checkpointer=saver and saver())
    *_, end = run_workflow(graph, "hello", config=THREAD)
    assert isinstance(end, WorkflowFinished)
    assert end.turns == 3


def test_sys_exit_in_a_path_function_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_runtime: OffsetRuntime
) -> None:
    graph = build_graph(join(tmp_path, monkeypatch, "__import__('sys').exit(0)"), runtime=fake_runtime)
    with pytest.raises(WorkflowError, match=r"path 'join_routes:pick' of the edge from 'START' failed in .*line 2"):
        list(run_workflow(graph, "hello"))

"""Kill a workflow in the middle, and resume it at the agent that had not finished.

    python examples/resume_after_kill.py                  # on smollm2-135m
    python examples/resume_after_kill.py --model fake     # without a model, in seconds

A child process runs a workflow with a checkpoint file and is killed (SIGKILL) while its last agent
writes. Then this process opens the file and goes on: the reporter and the headline are not written
again, the speech is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from offset_runtime import OffsetRuntime
from offset_runtime.backends.base import Chunk
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.graphs import Workflow, WorkflowGraph, build_graph, run_workflow, show_events, sqlite_checkpoints

INPUT = "A bridge was opened in the harbour town today."
THREAD: Any = {"configurable": {"thread_id": "bridge"}}
TOKENS_BEFORE_THE_KILL = 10


def newsroom(model: str) -> Workflow:
    """A reporter, then a headline and a speech in parallel. The speech takes longest."""
    return Workflow.model_validate(
        {
            "version": 1,
            "name": "newsroom",
            "model": {"base": model},
            "agents": {
                "reporter": {"system_prompt": "Write one short sentence of news about it.", "max_tokens": 24},
                "headline": {"system_prompt": "Write a headline of four words.", "max_tokens": 8},
                "speech": {"system_prompt": "Write a long speech about it.", "max_tokens": 80},
            },
            "edges": [
                {"source": "START", "target": "reporter"},
                {"source": "reporter", "target": ["headline", "speech"]},
                {"source": ["headline", "speech"], "target": "END"},
            ],
        }
    )


class SlowFakeBackend(FakeBackend):
    """The fake backend is instant; this one leaves time to be killed in."""

    def forward(self, chunks: Sequence[Chunk]) -> list[Any]:
        time.sleep(0.02)
        return super().forward(chunks)


@contextmanager
def opened(model: str, checkpoints: Path) -> Iterator[WorkflowGraph]:
    """The workflow's graph, with its state kept in the file `checkpoints`."""
    base: AbstractContextManager[OffsetRuntime | None] = nullcontext()
    if model == "fake":
        base = OffsetRuntime(SlowFakeBackend())
    with base as runtime, sqlite_checkpoints(checkpoints) as saver:
        yield build_graph(newsroom(model), checkpointer=saver, runtime=runtime)


def run_and_kill(model: str, checkpoints: Path) -> list[str]:
    """Run the workflow in a child process, kill it while the speech is written; return who had finished."""
    command = [sys.executable, __file__, "--model", model, "--child", str(checkpoints)]
    finished: list[str] = []
    speech_tokens = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            event = json.loads(line)
            if event["event"] == "agent_finished":
                finished.append(event["agent"])
                print(f"{event['agent']}: {event['reply']}")
            elif event["event"] == "agent_token" and event["agent"] == "speech" and "headline" in finished:
                speech_tokens += 1
                if speech_tokens == TOKENS_BEFORE_THE_KILL:
                    child.kill()
                    break
    return finished


def demonstrate(model: str, checkpoints: Path) -> tuple[list[str], list[str]]:
    """Return the agents that finished before the kill, and those that ran after it."""
    before = run_and_kill(model, checkpoints)
    print("-- killed while the speech was written; resuming --")
    with opened(model, checkpoints) as graph:
        after = [turn.agent for turn in show_events(run_workflow(graph, None, config=THREAD))]
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a workflow in the middle, and resume it.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        with opened(options.model, options.child) as graph:
            show_events(run_workflow(graph, INPUT, config=THREAD), as_json=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        before, after = demonstrate(options.model, Path(folder) / "checkpoints.sqlite")
    print(f"finished before the kill: {', '.join(before)}; ran after it: {', '.join(after)}")


if __name__ == "__main__":
    main()

"""Reading what agents begin with before they are asked anything."""

from __future__ import annotations

import logging

from offset_runtime.errors import OffsetError
from offset_runtime.graphs.builder import chat_model, instructions
from offset_runtime.graphs.flow import upcoming
from offset_runtime.graphs.history import history
from offset_runtime.graphs.schema import START, Workflow
from offset_runtime.request import Reuse
from offset_runtime.runtime import OffsetRuntime

_log = logging.getLogger(__name__)


def warm_up(workflow: Workflow, runtime: OffsetRuntime, *, thread: str = "", steps_away: int = 1) -> int:
    """Have the system prompts of `workflow`'s agents read, each once the engine has nothing else to do.

    Returns at once, with the number of tokens. Agents of a shared or verbatim history begin with the transcript, so
    there is nothing to read ahead. `thread`: the id of the thread that is to run. `steps_away`: how far off, at the
    least, the turns of those agents are (1: the first); of a run that starts now, 2 leaves out those whose prompts are
    read anyhow.
    """
    if history(workflow) != "separate":
        return 0
    expected = upcoming(workflow, START)
    first = sorted(expected, key=lambda name: expected[name])
    later = [name for name in first if expected[name] >= steps_away]
    return sum(_warm(runtime, workflow, name, Reuse(thread, name, expected)) for name in later)


def _warm(runtime: OffsetRuntime, workflow: Workflow, name: str, reuse: Reuse) -> int:
    agent = workflow.agents[name]
    told = instructions(workflow, agent)
    if not told:
        return 0
    system = [{"role": "system", "content": told}]
    try:
        offset = chat_model(workflow, agent, runtime).offset()
        return runtime.warm(system, domain=offset, strength=agent.strength, reuse=reuse)
    except OffsetError as error:
        # Whatever it is, the agent's own turn says it better.
        _log.debug("the system prompt of agent %r is not read ahead: %s", name, error)
        return 0

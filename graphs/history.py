"""How a workflow's agents are shown its messages, where the workflow does not say."""

from __future__ import annotations

from offset_runtime.agents.transcript import History
from offset_runtime.graphs.flow import choices, reachable
from offset_runtime.graphs.schema import Workflow


def history(workflow: Workflow) -> History:
    """How agents are shown the messages: as the workflow says, else by its pattern.

    Where several agents read all messages and take turns in another way than one after the other, once (handoffs,
    choices, branches that run in parallel, cycles), they share the transcript's state.
    """
    if workflow.history is not None:
        return workflow.history
    follows = choices(workflow)
    readers = [name for name, agent in workflow.agents.items() if agent.reads is None]
    chain = all(len(ends) == 1 and len(ends[0]) == 1 for ends in follows.values())
    cycle = any(name in reachable(name, follows) for name in workflow.agents)
    return "shared" if len(readers) > 1 and (cycle or not chain) else "separate"

"""A tool of your own: the model fills in its arguments, the tool runs, and the model answers from what it returned.

    python examples/custom_tool.py "When does the ferry to Kiel leave in the morning?"

The call is forced, so it is held to the tool's schema while it is decoded: even a small base that was never trained on
tools writes a valid one, though not always the one that was asked for. With a base that was, leave `tool_choice` out
and let it decide, or hand the tools to LangChain's `create_agent(model, tools=[find_ferry])`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from offset_runtime.agents import ChatOffset

STORE = Path(__file__).parent / "newsroom" / "offsets"
DEPARTURES = {("Oslo", "morning"): "07:30", ("Oslo", "evening"): "19:15", ("Kiel", "morning"): "06:45"}


@tool
def find_ferry(port: Literal["Oslo", "Kiel"], part_of_day: Literal["morning", "evening"]) -> str:
    """Find when the ferry to a port leaves."""
    time = DEPARTURES.get((port, part_of_day))
    return f"The ferry to {port} leaves at {time}." if time else f"No ferry to {port} in the {part_of_day}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="When does the ferry to Oslo leave in the morning?")
    parser.add_argument("--model", default="smollm2-135m")
    given = parser.parse_args()
    model = ChatOffset(model=given.model, domain="news", store=STORE, max_tokens=60)

    question = HumanMessage(given.question)
    call = model.bind_tools([find_ferry], tool_choice="find_ferry").invoke([question])
    asked = call.tool_calls[0]
    print(f"call:   {asked['name']}({', '.join(f'{k}={v!r}' for k, v in asked['args'].items())})")

    result = find_ferry.invoke(asked)
    print(f"result: {result.text}")

    answer = model.invoke([question, call, result])
    print(f"answer: {answer.text}")


if __name__ == "__main__":
    main()

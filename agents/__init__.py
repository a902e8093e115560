"""LangChain chat model and LLM, and agents with a domain."""

from offset_runtime.agents.chat_model import ChatOffset
from offset_runtime.agents.llm import OffsetLLM
from offset_runtime.agents.node import agent_node
from offset_runtime.agents.transcript import History

__all__ = ["ChatOffset", "History", "OffsetLLM", "agent_node"]

"""LangChain chat model and LLM, agents with a domain, and likelihood under a domain as a router and a re-ranker."""

from offset_runtime.agents.chat_model import ChatOffset
from offset_runtime.agents.llm import OffsetLLM
from offset_runtime.agents.middleware import DomainMiddleware
from offset_runtime.agents.node import agent_node
from offset_runtime.agents.node_cache import domain_cache_policy
from offset_runtime.agents.reranker import OffsetReranker
from offset_runtime.agents.retry import retry_policy
from offset_runtime.agents.router import DomainRouter, RoutedState
from offset_runtime.agents.transcript import History

__all__ = [
    "ChatOffset",
    "DomainMiddleware",
    "DomainRouter",
    "History",
    "OffsetLLM",
    "OffsetReranker",
    "RoutedState",
    "agent_node",
    "domain_cache_policy",
    "retry_policy",
]

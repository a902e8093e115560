"""DomainMiddleware: the domain of each model call of a `create_agent` agent."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.messages import HumanMessage

from offset_runtime.agents.router import DomainRouter
from offset_runtime.errors import InvalidRequestError

Pick = Callable[[ModelRequest[Any]], str | None]


class DomainMiddleware(AgentMiddleware[Any, Any]):
    """Gives each call of the agent's model, a `ChatOffset`, a domain.

    `domain`: the name of one; a function from LangChain's `ModelRequest` (its `messages`, `state`, `runtime.context`)
    to a name or None, the plain base; or a `DomainRouter`, which finds the domain of the last human message, and
    leaves the model's own where it is unsure. A function runs in a thread where the agent runs on an event loop.
    """

    def __init__(self, domain: str | Pick | DomainRouter) -> None:
        super().__init__()
        plain = callable(domain) and not isinstance(domain, type) and not inspect.iscoroutinefunction(domain)
        if not (isinstance(domain, str | DomainRouter) or plain):
            raise InvalidRequestError(
                f"DomainMiddleware({domain!r}): expected the name of a domain, a function (no coroutine) from a model "
                "request to one, or a DomainRouter"
            )
        self._domain = domain

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        if isinstance(self._domain, DomainRouter):
            found = self._domain.route(_last_human(request))
            return handler(request if found is None else _in_domain(request, found))
        return handler(_in_domain(request, self._picked(request)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        if isinstance(self._domain, DomainRouter):
            found = await self._domain.aroute(_last_human(request))
            return await handler(request if found is None else _in_domain(request, found))
        return await handler(_in_domain(request, await asyncio.to_thread(self._picked, request)))

    def _picked(self, request: ModelRequest[Any]) -> str | None:
        assert not isinstance(self._domain, DomainRouter)
        return self._domain if isinstance(self._domain, str) else self._domain(request)


def _in_domain(request: ModelRequest[Any], domain: str | None) -> ModelRequest[Any]:
    return request.override(model_settings={**request.model_settings, "domain": domain})


def _last_human(request: ModelRequest[Any]) -> str:
    texts = [str(message.text) for message in request.messages if isinstance(message, HumanMessage)]
    return texts[-1] if texts else ""

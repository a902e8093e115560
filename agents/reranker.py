"""OffsetReranker: documents in the order in which they lead to the query, under a domain."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field

from offset_runtime.agents.chat_model import ChatOffset
from offset_runtime.agents.likelihood import first_tokens, likelihood_request, longest_prompt, speaker, total
from offset_runtime.agents.submission import arun_together, run_together
from offset_runtime.chat import check_text
from offset_runtime.errors import ContextOverflowError, InvalidRequestError
from offset_runtime.offset import DomainOffset
from offset_runtime.request import Completion, Request
from offset_runtime.runtime import OffsetRuntime

# Where rerankers of LangChain put it.
SCORE = "relevance_score"

_REQUEST = "Here is a document.\n\n{document}\n\nWrite the question that it answers."


class OffsetReranker(BaseDocumentCompressor):
    """Ranks documents by the likelihood of the query, given the document, under a domain's offset.

    The document stands in the user's message, which asks for the question it answers, and the query is scored as the
    reply: nothing is generated. All documents go to the engine together. A document's score, the log-likelihood of
    the query in nats a token, is under ``relevance_score`` in its metadata, in a copy of it.

    `model`: a `ChatOffset`, which knows the offsets, or the name of a base model (``base#domain``), with its offsets
    in `runtime` or in the folder ``offsets``. `domain`: whose offset the query is scored under; None is the plain
    base, and left out it is the model's. `top_n`: how many documents are returned; None is all. `max_tokens`: how many
    of a document's first tokens are read. What is beyond that, or does not fit into the context beside the query,
    is left out at the document's end.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: ChatOffset | str
    domain: str | None = None
    top_n: int | None = Field(default=None, ge=1)
    max_tokens: int = Field(default=512, ge=1)
    runtime: OffsetRuntime | None = Field(default=None, exclude=True, repr=False)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Return the `top_n` documents, the best first; equals keep their order.

        Raises `InvalidRequestError` for an empty query, `ContextOverflowError` for one that fills the context,
        `UnknownDomainError`, `PromptFormatError` for an offset of another format than chat, and what the engine raises.
        """
        runtime, requests = self._prepare(documents, query)
        return self._ranked(documents, run_together(runtime, requests, self._speaker().max_retries))

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """As `compress_documents`, without blocking the event loop."""
        runtime, requests = await asyncio.to_thread(self._prepare, documents, query)
        return self._ranked(documents, await arun_together(runtime, requests, self._speaker().max_retries))

    def _speaker(self) -> ChatOffset:
        model = speaker(self.model, self.runtime)
        return model.for_domain(self.domain) if "domain" in self.model_fields_set else model

    def _prepare(self, documents: Sequence[Document], query: str) -> tuple[OffsetRuntime, list[Request]]:
        check_text(query)
        if not query.strip():
            raise InvalidRequestError("the query is empty, so there is nothing to rank by; give some words")
        model = self._speaker()
        offset, runtime = model.offset(), model.load_runtime()
        reply = runtime.backend.tokenizer.encode(query.strip())
        return runtime, [self._request(model, offset, document.page_content, reply) for document in documents]

    def _request(self, model: ChatOffset, offset: DomainOffset | None, text: str, reply: Sequence[int]) -> Request:
        runtime, kept = model.load_runtime(), self.max_tokens
        context = longest_prompt(runtime)
        while True:
            message = {"role": "user", "content": _REQUEST.format(document=first_tokens(runtime, text, kept))}
            request = likelihood_request(model, offset, [message], reply)
            over = len(request.prompt_ids) - context
            if over <= 0:
                return request
            if kept == 0:
                raise ContextOverflowError(
                    f"the query has {len(reply)} tokens, which leaves no room for a document in the context of "
                    f"{context} tokens; shorten the query"
                )
            known = len(runtime.backend.tokenizer.encode(text))
            kept = max(min(kept, known) - over, 0)

    def _ranked(self, documents: Sequence[Document], completions: Sequence[Completion]) -> list[Document]:
        scored = []
        for document, completion in zip(documents, completions, strict=True):
            score = total(completion) / len(completion.prompt_logprobs)
            metadata: dict[str, Any] = {**document.metadata, SCORE: score}
            scored.append((score, document.model_copy(update={"metadata": metadata})))
        scored.sort(key=lambda pair: -pair[0])
        return [document for _, document in scored[: self.top_n]]

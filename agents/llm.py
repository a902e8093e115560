"""OffsetLLM: a LangChain text-completion model with a domain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun, Callbacks
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig

from offset_runtime.agents.connection import Connection
from offset_runtime.agents.reply import logprobs_metadata, usage_metadata
from offset_runtime.agents.submission import Call, arun_together, astream_chunks, run_together, stream_chunks
from offset_runtime.request import Completion, Delta

# What `generate` takes for its own use; all else is an argument of the model.
_RUN_ARGUMENTS = frozenset({"tags", "metadata", "run_name", "run_id"})


class _TextCall(Call[GenerationChunk]):
    __slots__ = ()

    def info(self, completion: Completion) -> dict[str, Any]:
        return {**self.provenance.metadata(completion), "usage_metadata": usage_metadata(completion)}

    def result(self, completions: Sequence[Completion]) -> LLMResult:
        tokenizer = self.runtime.backend.tokenizer
        generations = [
            [
                Generation(
                    text=completion.text,
                    generation_info={**self.info(completion), **logprobs_metadata(tokenizer, completion.logprobs)},
                )
            ]
            for completion in completions
        ]
        return LLMResult(generations=generations, llm_output={"model_name": self.provenance.model_name})

    def chunk(self, delta: Delta) -> GenerationChunk | None:
        info = logprobs_metadata(self.runtime.backend.tokenizer, delta.logprobs)
        return GenerationChunk(text=delta.text, generation_info=info or None) if delta.text or info else None

    def last_chunk(self, completion: Completion) -> GenerationChunk:
        return GenerationChunk(text="", generation_info=self.info(completion))


class OffsetLLM(Connection, BaseLLM):
    """Continues plain text on the shared base, in a domain of prompt format `raw` or `bos`.

    See `Connection` for its fields. Several prompts given at once run in one batch of the engine. Each
    generation's `generation_info` holds token usage, finish reason, domain, digest and strength of the
    offset, and seconds per phase. LangGraph streams tokens of chat models only, so in a graph prefer
    `ChatOffset`.
    """

    def generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        # The key of LangChain's cache leaves a call's arguments out, so they must be the model's own by now.
        settings, run = self._split(kwargs)
        return BaseLLM.generate(settings, prompts, stop, callbacks, **run)

    async def agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        callbacks: Callbacks | list[Callbacks] | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        settings, run = self._split(kwargs)
        await settings._read_offset({})
        return await BaseLLM.agenerate(settings, prompts, stop, callbacks, **run)

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[str]:
        await self._read_offset(kwargs)
        async with aclosing(cast(Any, super().astream(input, config, stop=stop, **kwargs))) as texts:
            async for text in texts:
                yield text

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = self.configured(kwargs)._prepare(prompts, stop)
        return call.result(run_together(call.runtime, call.requests, call.max_retries))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        call = await asyncio.to_thread(self.configured(kwargs)._prepare, prompts, stop)
        return call.result(await arun_together(call.runtime, call.requests, call.max_retries))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        return stream_chunks(self.configured(kwargs)._prepare([prompt], stop), run_manager)

    def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        return astream_chunks(partial(self.configured(kwargs)._prepare, [prompt], stop), run_manager)

    def _prepare(self, prompts: Sequence[str], stop: Sequence[str] | None) -> _TextCall:
        offset = self.offset()
        runtime = self.load_runtime()
        sampling = self.sampling(stop)
        requests = [
            runtime.text_request(
                prompt, domain=offset, strength=self.strength, sampling=sampling, timeout_s=self.timeout
            )
            for prompt in prompts
        ]
        return _TextCall(runtime, requests, self._provenance(offset), self.max_retries)

    def _split(self, arguments: dict[str, Any]) -> tuple[OffsetLLM, dict[str, Any]]:
        """Divide arguments into a model that has its own of them applied, and those for LangChain."""
        run = {name: arguments[name] for name in arguments.keys() & _RUN_ARGUMENTS}
        return self.configured({name: arguments[name] for name in arguments.keys() - _RUN_ARGUMENTS}), run

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self.configured(kwargs)._tracing_params("llm", stop)

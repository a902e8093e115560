"""What is told about a reply: token usage, provenance, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from offset_runtime.backends.base import Tokenizer
from offset_runtime.request import Completion, TokenLogprob


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which model, domain and offset a reply comes from. `offset_digest` is the file's, before `strength`."""

    model_name: str
    domain: str | None
    offset_digest: str | None
    strength: float

    def metadata(self, completion: Completion) -> dict[str, Any]:
        """Return the provenance, why the reply ended, the seconds each phase took, and what the prefix cache did."""
        return {
            **asdict(self),
            "finish_reason": completion.finish_reason,
            "timings": asdict(completion.timings),
            "cache": {"hit_tokens": completion.usage.cached_tokens, **asdict(completion.cache)},
        }


def usage_metadata(completion: Completion) -> UsageMetadata:
    """Token counts of a reply; `cache_read` are prompt tokens that were not read again."""
    usage = completion.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        input_token_details=InputTokenDetails(cache_read=usage.cached_tokens),
    )


def logprobs_metadata(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return `{"logprobs": {"content": [{"token", "logprob", "bytes", "top_logprobs"}]}}`, as OpenAI's API does.

    Empty where there are none. `bytes` is None for a token that holds only a part of a character.
    """
    # Some tokenizers drop a leading space at the start of a text, so tokens are decoded after this one.
    before = tokenizer.encode("a")
    prefix = tokenizer.decode(before)

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([*before, token_id]).removeprefix(prefix)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    content = [
        {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*top) for top in item.top]} for item in logprobs
    ]
    return {"logprobs": {"content": content}} if content else {}

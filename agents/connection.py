"""What the chat model and the LLM share: their fields, the domain's offset, the loaded base, sampling."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

from langchain_core.language_models.base import BaseLanguageModel, LangSmithParams
from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from offset_runtime.agents.reply import Provenance
from offset_runtime.agents.sampling_fields import SAMPLING_FIELDS, check_limits
from offset_runtime.backends.options import LlamaCppOptions
from offset_runtime.chat import check_text
from offset_runtime.engine import EngineSettings
from offset_runtime.errors import InvalidRequestError, OffsetError, UnknownDomainError, nearest_hint
from offset_runtime.models import BackendName, ModelSpec
from offset_runtime.offset import DomainOffset
from offset_runtime.runtime import OffsetRuntime
from offset_runtime.sampling import SamplingParams
from offset_runtime.shared import shared_runtimes
from offset_runtime.store import OffsetStore

PROVIDER = "offset-runtime"

# Fields that are arguments of a call too.
CALL_FIELDS = frozenset(
    {*SAMPLING_FIELDS, "model", "domain", "strength", "logprobs", "top_logprobs", "timeout", "max_retries"}
)

# What ChatOllama, ChatLlamaCpp and ChatHuggingFace call it.
_CALLED_ELSEWHERE = {
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "num_ctx": 'llama_cpp={"n_ctx": …}',
    "n_ctx": 'llama_cpp={"n_ctx": …}',
    "n_threads": 'llama_cpp={"n_threads": …}',
    "n_gpu_layers": 'llama_cpp={"n_gpu_layers": …}',
    "model_path": "model",
    "model_id": "model",
    "format": "with_structured_output(…)",
}


class Connection(BaseLanguageModel[Any]):
    """Fields of a model on the shared base, and how a call is resolved from them.

    The constructor loads nothing. All instances with the same `model`, `backend`, `dtype`, `device` and
    `llama_cpp` share one loaded base in the process. An offset file is read at its first use and kept; a domain
    trained anew is picked up by a new instance. A value out of its range raises pydantic's
    `ValidationError` here, and `InvalidRequestError` where it is an argument of a call.

    `model`: the base model, or ``base#domain``, split at the last ``#`` where the whole is no path that
    exists. `backend`, `dtype`, `device`, `llama_cpp`: as in `ModelSpec`. `domain`: the domain; None is the plain base.
    `strength` scales its offset. `domains`: offset files by domain, under the names given here; other
    domains are looked up in the directory `store` (and before that in `runtime`, where one is given).
    `temperature` to `seed`: as in `SamplingParams`; None is its default, which is greedy. `stop`: texts
    that end the reply and are left out of it. `logprobs`: return each token's log-probability, and with
    `top_logprobs` the likeliest alternatives. `timeout`: seconds for a call, waiting included.
    `max_retries`: how often a call that found the engine's queue full is tried again. `api_key`: not used, since the
    model runs here; what makes chat models of any provider passes one. `runtime`: an already loaded base to use for
    `model`.

    Per call, as keyword arguments of `invoke`, `stream` and so on, all of these but `backend`, `dtype`,
    `device`, `llama_cpp`, `domains`, `store`, `api_key` and `runtime` may be given; the call's `stop` adds to the
    model's own.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    backend: BackendName = "auto"
    dtype: str | None = None
    device: str | None = None
    llama_cpp: LlamaCppOptions = LlamaCppOptions()
    domain: str | None = None
    strength: float = Field(default=1.0, allow_inf_nan=False)
    domains: dict[str, Path] = Field(default_factory=dict)
    store: Path = Path("offsets")
    temperature: float | None = None
    max_tokens: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    timeout: float | None = Field(default=None, gt=0)
    max_retries: int = Field(default=2, ge=0)
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    runtime: OffsetRuntime | None = Field(default=None, exclude=True, repr=False)

    _call_fields: ClassVar[frozenset[str]] = CALL_FIELDS
    # What a call takes that is no field, or not in the same way.
    _call_arguments: ClassVar[frozenset[str]] = frozenset({"stop"})
    _offsets: dict[tuple[str, Path], DomainOffset] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in values:
            if name not in cls.model_fields:
                called = _CALLED_ELSEWHERE.get(name)
                hint = f"; here it is {called}" if called else nearest_hint(str(name), cls.model_fields)
                raise InvalidRequestError(f"{cls.__name__} has no field {name!r}{hint}")
        return _with_address_split(values)

    @field_validator("llama_cpp", mode="before")
    @classmethod
    def _check_llama_cpp(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        known = LlamaCppOptions.model_fields
        for name in value:
            if name not in known:
                hint = nearest_hint(str(name), known) or f"; expected one of {', '.join(known)}"
                raise InvalidRequestError(f"llama_cpp of {cls.__name__} has no option {name!r}{hint}")
        return dict(value)

    @field_validator(*SAMPLING_FIELDS, "stop", "top_logprobs")
    @classmethod
    def _check_sampling(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        check_limits("logprobs" if name == "top_logprobs" else name, value)
        return value

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=True")
        return self

    def for_domain(self, domain: str | None) -> Self:
        """Return the same model in another domain (None: the plain base), on the same loaded base."""
        return self.configured({"domain": domain})

    def configured(self, overrides: Mapping[str, Any]) -> Self:
        """Return this model with the keyword arguments of one call applied.

        Raises `InvalidRequestError` for an argument that no call takes, or a value it cannot have.
        """
        # LangChain's own switch for streaming travels with the arguments of the model.
        given = {name: value for name, value in overrides.items() if name != "stream"}
        if not given:
            return self
        for name in given:
            if name not in self._call_fields:
                known = sorted(self._call_fields | self._call_arguments)
                raise InvalidRequestError(
                    f"{type(self).__name__} got the unknown argument {name!r}{nearest_hint(name, known)} "
                    f"(a call takes: {', '.join(known)})"
                )
        given = _with_address_split(given)
        fields = {name: getattr(self, name) for name in self.model_fields_set} | given
        if given.get("model", self.model) != self.model:
            for name in ("runtime", "profile"):
                fields.pop(name, None)
        try:
            changed = type(self)(**fields)
        except ValidationError as error:
            raise InvalidRequestError(f"{type(self).__name__} was called with {_first_problem(error)}") from error
        changed._offsets = self._offsets
        return changed

    @property
    def address(self) -> str:
        """The base model's name, with ``#domain`` if there is a domain."""
        return self.model if self.domain is None else f"{self.model}#{self.domain}"

    def load_runtime(self) -> OffsetRuntime:
        """Return the loaded base, loading it if this process has not yet; the first call does so by itself.

        Raises `ModelNotFoundError` or `UnsupportedModelError`.
        """
        if self.runtime is not None:
            return self.runtime
        spec = ModelSpec(
            base=self.model,
            backend=self.backend,
            dtype=self.dtype,
            device=self.device,
            llama_cpp=self.llama_cpp,
        )
        return shared_runtimes.get(spec)

    def offset(self) -> DomainOffset | None:
        """Return the offset of `domain`, reading its file at first use; None for the plain base.

        Raises `UnknownDomainError` or `OffsetFileError`. The base model is not loaded.
        """
        if self.domain is None:
            return None
        if (known := self._known_offset(self.domain)) is not None:
            return known
        found = self._read_file(self.domain)
        self._offsets[self.domain, self._offset_file(self.domain)] = found
        return found

    def sampling(self, stop: Sequence[str] | str | None = None) -> SamplingParams:
        """How to draw the reply, `stop` added to the model's own.

        Raises `InvalidRequestError` for a value out of its range.
        """
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS if getattr(self, name) is not None}
        try:
            return SamplingParams(
                **values,
                stop=tuple(dict.fromkeys([*_as_list(self.stop), *_as_list(stop)])),
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            )
        except ValidationError as error:
            raise InvalidRequestError(f"{type(self).__name__} was given {_first_problem(error)}") from error

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of `text` under the base model's tokenizer. Loads the base."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        check_text(text)
        return self.load_runtime().backend.tokenizer.encode(text)

    @property
    def max_running(self) -> int:
        """How many calls the engine runs at once."""
        return (self.runtime.engine.settings if self.runtime is not None else EngineSettings()).max_running

    @property
    def _llm_type(self) -> str:
        return PROVIDER

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """All that decides the reply. LangChain's cache of replies is keyed by it, so domains never mix there."""
        sampling = self.sampling()
        # A cache hit needs no offset, and a call that needs one raises what is wrong with it.
        digest = None
        with contextlib.suppress(OffsetError):
            digest = offset.digest if (offset := self.offset()) else None
        return {
            "model": self.model,
            "backend": self.backend,
            "dtype": self.dtype,
            "device": self.device,
            "llama_cpp": self.llama_cpp.model_dump(exclude_defaults=True),
            "base_digest": None if self.runtime is None else _base_digest(self.runtime),
            "domain": self.domain,
            "offset_digest": digest,
            "strength": self.strength,
            **sampling.model_dump(exclude={"stop"}),
            # LangChain overwrites the key `stop` with the call's.
            "stop_sequences": list(sampling.stop),
        }

    def _tracing_params(self, kind: Literal["chat", "llm"], stop: list[str] | None) -> LangSmithParams:
        """Parameters that LangGraph shows with every token in ``stream_mode="messages"``."""
        sampling = self.sampling(stop)
        params: dict[str, Any] = {
            "ls_provider": PROVIDER,
            "ls_model_name": self.address,
            "ls_model_type": kind,
            "ls_temperature": sampling.temperature,
            "ls_max_tokens": sampling.max_tokens,
            "domain": self.domain,
        }
        if sampling.stop:
            params["ls_stop"] = list(sampling.stop)
        return cast(LangSmithParams, params)

    async def _read_offset(self, arguments: Mapping[str, Any]) -> None:
        """Read the offset of a call in a thread, so that what LangChain asks of it later finds it in memory."""
        settings = self.configured({name: arguments[name] for name in arguments.keys() & self._call_fields})
        if settings.domain is not None and settings._known_offset(settings.domain) is None:
            await asyncio.to_thread(settings.offset)

    def _provenance(self, offset: DomainOffset | None) -> Provenance:
        digest = None if offset is None else offset.digest
        return Provenance(self.address, self.domain, digest, self.strength)

    def _known_offset(self, domain: str) -> DomainOffset | None:
        if self.runtime is not None and domain not in self.domains and domain in self.runtime.offsets:
            return self.runtime.offsets[domain]
        return self._offsets.get((domain, self._offset_file(domain)))

    def _offset_file(self, domain: str) -> Path:
        return self.domains[domain] if domain in self.domains else OffsetStore(self.store).path(domain)

    def _read_file(self, domain: str) -> DomainOffset:
        if domain in self.domains:
            return DomainOffset.load(self.domains[domain]).renamed(domain)
        store = OffsetStore(self.store)
        try:
            return store.get(domain)
        except UnknownDomainError as error:
            registered = () if self.runtime is None else self.runtime.offsets
            known = {*self.domains, *registered, *store.domains()}
            raise UnknownDomainError(domain, known, where=f"`domains` and the store {self.store}") from error


def _with_address_split(values: dict[str, Any]) -> dict[str, Any]:
    """Turn ``model="base#domain"`` into `model` and `domain`; a path that exists is the model as it stands."""
    model = values.get("model")
    if isinstance(model, str) and not model.strip():
        # As a path, an empty name would be the current folder.
        raise InvalidRequestError(
            f"model {model!r} is empty; expected a base model, such as a packaged name, a hub id, a folder or a "
            ".gguf file, or 'base#domain'"
        )
    if not isinstance(model, str) or "#" not in model or _is_path(model):
        return values
    base, _, domain = model.rpartition("#")
    if not base or not domain:
        raise InvalidRequestError(f"model {model!r} is not of the form 'base#domain'; for the plain base leave '#' out")
    if values.get("domain") not in (None, domain):
        raise InvalidRequestError(
            f"model {model!r} names domain {domain!r}, but domain={values['domain']!r} is given too; give one of them"
        )
    return {**values, "model": base, "domain": domain}


def _is_path(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        # Too long for a path, or in the home of a user who is not there.
        return False


def _as_list(stop: Sequence[str] | str | None) -> Sequence[str]:
    return [stop] if isinstance(stop, str) else stop or []


def _base_digest(runtime: OffsetRuntime) -> str:
    # With a runtime of the caller's, `model` is only a label.
    return hashlib.sha256(runtime.backend.identity.model_dump_json().encode()).hexdigest()


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    if not problem["loc"]:
        return problem["msg"].removeprefix("Value error, ")
    return f"{'.'.join(str(part) for part in problem['loc'])}={problem['input']!r}: {problem['msg']}"

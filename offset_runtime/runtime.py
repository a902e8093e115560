"""OffsetRuntime: one base model, any number of domains. What people call."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from numbers import Real
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from offset_runtime.backends.base import Backend, Message
from offset_runtime.chat import chat_prompt, chat_turns, check_text
from offset_runtime.constrain import Constraint
from offset_runtime.documents import Document
from offset_runtime.engine import Engine, EngineSettings
from offset_runtime.errors import InvalidRequestError, PromptFormatError, UnknownDomainError
from offset_runtime.layout import lay_out
from offset_runtime.models import ModelSpec, load_backend
from offset_runtime.offset import DomainOffset, PromptFormat
from offset_runtime.placement import Placement, place
from offset_runtime.request import Completion, Event, Request, Reuse
from offset_runtime.sampling import SamplingParams
from offset_runtime.state_folder import DEFAULT_MAX_BYTES, StateFolder
from offset_runtime.store import OffsetStore
from offset_runtime.stream import AsyncStream, Stream
from offset_runtime.tool_formats import ToolFormat
from offset_runtime.tools import Tool

_log = logging.getLogger(__name__)

Domain = str | DomainOffset | None


@dataclass(frozen=True, slots=True)
class Score:
    """Log-likelihood of a text under a domain: natural logs, over `tokens` tokens."""

    domain: str | None
    prompt_format: PromptFormat
    tokens: int
    logprob: float

    @property
    def logprob_per_token(self) -> float:
        return self.logprob / max(self.tokens, 1)


class OffsetRuntime:
    """A loaded base model, its engine, and the domains registered on it.

    A domain is an argument of each request, given by name or as a `DomainOffset`; None is the plain
    base. Nothing is ever active for the model as a whole. Usable as a context manager. `model`: what traces call the
    base model; None: its architecture.
    """

    def __init__(self, backend: Backend, *, settings: EngineSettings | None = None, model: str | None = None) -> None:
        self.backend = backend
        self.engine = Engine(backend, settings, model=model)
        self._offsets: dict[str, DomainOffset] = {}
        self._checked: set[str] = set()
        # Kept, since each knows which of its files are damaged and are to be written again.
        self._folders: dict[Path, StateFolder] = {}

    @classmethod
    def load(
        cls,
        model: str | ModelSpec,
        *,
        store: str | os.PathLike[str] | OffsetStore | None = None,
        settings: EngineSettings | None = None,
    ) -> Self:
        """Load a base model, and register every offset of `store`.

        Raises what `load_backend`, `OffsetStore.get` and `register` raise.
        """
        spec = ModelSpec(base=model) if isinstance(model, str) else model
        offsets = []
        if store is not None:
            found = store if isinstance(store, OffsetStore) else OffsetStore(store)
            offsets = [found.get(domain) for domain in found.domains()]
        runtime = cls(load_backend(spec), settings=settings, model=spec.base)
        try:
            for offset in offsets:
                runtime.register(offset)
        except BaseException:
            runtime.close()
            raise
        return runtime

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine and release the model; open requests fail with `EngineClosedError`."""
        self.engine.close()
        self.backend.close()

    @property
    def offsets(self) -> Mapping[str, DomainOffset]:
        """The registered offsets by domain."""
        return MappingProxyType(self._offsets)

    def register(self, offset: DomainOffset) -> None:
        """Make an offset known under its domain, replacing an earlier one for requests from now on.

        Raises `BaseModelMismatchError` when it was made for another base model.
        """
        self._check(offset)
        self._offsets[offset.domain] = offset

    def offset(self, domain: Domain) -> DomainOffset | None:
        """Return the offset that `domain` names; None stays None.

        Raises `UnknownDomainError`, `BaseModelMismatchError`, or `InvalidRequestError` for a value that
        names no domain.
        """
        if domain is None:
            return None
        if isinstance(domain, DomainOffset):
            self._check(domain)
            return domain
        _check_name(domain)
        try:
            return self._offsets[domain]
        except KeyError:
            raise UnknownDomainError(domain, self._offsets) from None

    def chat_request(
        self,
        messages: Sequence[Message],
        *,
        domain: Domain = None,
        strength: float = 1.0,
        sampling: SamplingParams | None = None,
        timeout_s: float | None = None,
        turn_offsets: Mapping[int, DomainOffset | None] | None = None,
        reuse: Reuse | None = None,
        constraint: Constraint | None = None,
        tools: Sequence[Tool] = (),
        tool_format: ToolFormat | None = None,
    ) -> Request:
        """Lay chat messages out with the model's template and place the domain's offset in them.

        `strength` scales the offset. `turn_offsets`: the turn-anchored offsets that earlier replies were written
        under (None: none), by index of the message. Such a reply is read as it was generated (`chat_turns`), its offset
        where it lay then, so that the state of that turn can be used as it is; an offset that would reach into a later
        one is left out. `reuse`, `constraint`: see `Request`. The first constraint of a runtime takes up to a second
        here, in which the vocabulary is read. `tools`: what the model is told it may call, in its own `tool_format`
        (`tool_formats.tool_format`) where that is None; the format's reader finds the calls in the reply.

        Raises `UnknownDomainError`, `BaseModelMismatchError`, `PromptFormatError` for an offset that was not trained
        in format `chat`, `PlacementError` for one that its turn has no room for, and `InvalidRequestError` for
        messages, a domain or a strength that are none, and for an author's offset without a turn; `ConstraintError` for
        a constraint that does not fit the model.
        """
        tokenizer, authors = self.backend.tokenizer, turn_offsets or {}
        self._check_authors(messages, authors)
        if constraint is not None:
            self.engine.check_constraint(constraint)
        prompt, begun = chat_turns(tokenizer, messages, authors, tools, tool_format)
        request = self._request(prompt, domain, strength, ("chat",), sampling, timeout_s)
        spoken = [place(offset, begun[index]) for index, offset in authors.items() if offset and index in begun]
        placements = _apart(request.placements, spoken)
        return replace(request, placements=placements, reuse=reuse, constraint=constraint)

    def warm(
        self, messages: Sequence[Message], *, domain: Domain = None, strength: float = 1.0, reuse: Reuse | None = None
    ) -> int:
        """Have what chats that begin with `messages` have in common, such as a system prompt, read ahead of them.

        That begins once no request waits or runs, and the prefix cache keeps the state. Returns at once, with how many
        tokens it is; 0 where there are none. Raises what `chat_request` raises for messages, domain and strength, and
        what `Engine.submit` does; what fails later is logged.
        """
        tokenizer = self.backend.tokenizer
        # What follows decides over the last token or two, and some templates refuse a system message alone.
        one, other = (chat_prompt(tokenizer, [*messages, {"role": "user", "content": text}]) for text in ("a", "1"))
        fixed = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
        if not fixed:
            return 0
        offset = self.offset(domain)
        # A turn-anchored offset lies behind what is fixed.
        early = offset if offset is not None and offset.anchor == "sequence" else None
        request = self._request(fixed, early, strength, ("chat",), SamplingParams(max_tokens=0), None)
        self.engine.submit(replace(request, reuse=reuse, background=True), _log_failure)
        return len(fixed)

    def text_request(
        self,
        text: str,
        *,
        domain: Domain = None,
        strength: float = 1.0,
        sampling: SamplingParams | None = None,
        timeout_s: float | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
        """Continue plain text; `constraint`: see `Request`.

        The start token comes first, where the text does not begin with it, for an offset trained in
        format `bos`, and without an offset for models that read plain text so. With format `raw` none does.

        Raises `UnknownDomainError`, `BaseModelMismatchError`, `PromptFormatError` for an offset that was
        trained in format `chat`, and `InvalidRequestError` for a text, a domain or a strength that is none.
        """
        check_text(text)
        if constraint is not None:
            self.engine.check_constraint(constraint)
        offset = self.offset(domain)
        tokenizer = self.backend.tokenizer
        prompt, start = tokenizer.encode(text), tokenizer.bos_token_id
        wanted = tokenizer.adds_bos if offset is None else offset.prompt_format == "bos"
        if wanted and start is not None and prompt[:1] != [start]:
            prompt = [start, *prompt]
        request = self._request(prompt, offset, strength, ("raw", "bos"), sampling, timeout_s)
        return replace(request, constraint=constraint)

    def run(self, request: Request) -> Completion:
        """Run a request and wait for its reply."""
        return self.stream(request).result()

    def stream(self, request: Request) -> Stream:
        """Run a request and read its reply as it comes."""
        return Stream(self.engine, request)

    async def arun(self, request: Request) -> Completion:
        """Run a request without blocking the event loop."""
        return await self.astream(request).result()

    def astream(self, request: Request) -> AsyncStream:
        """Run a request and read its reply as it comes, from the running event loop."""
        return AsyncStream(self.engine, request)

    def score(self, text: str, domains: Sequence[Domain], *, timeout_s: float | None = None) -> list[Score]:
        """Log-likelihood of `text` under each domain, in one batch.

        In format `chat` the text is scored as the reply to a request for it. Scores of different
        prompt formats are not comparable.

        Raises `UnknownDomainError`, `BaseModelMismatchError`, `InvalidRequestError` for a text that is
        too short or no valid Unicode, and `ContextOverflowError` for one that is too long.
        """
        check_text(text)
        streams = []
        for domain in domains:
            offset = self.offset(domain)
            prompt_format = offset.prompt_format if offset else self.default_format
            streams.append((offset, prompt_format, self._score_stream(text, offset, prompt_format, timeout_s)))
        scores = []
        for offset, prompt_format, stream in streams:
            found = stream.result().prompt_logprobs
            scores.append(Score(offset.domain if offset else None, prompt_format, len(found), sum(found)))
        return scores

    def save_state(self, folder: str | os.PathLike[str] | StateFolder, *, max_bytes: int = DEFAULT_MAX_BYTES) -> int:
        """Save what the prefix cache holds, so that a later process need not read it again; see `Engine.save_state`.

        `max_bytes`: what the folder's states may take together, the oldest go first (a `StateFolder` has its own).
        Returns how many entries of the cache the folder then holds. Raises `StateFolderError` too.
        """
        return self.engine.save_state(self._state_folder(folder, max_bytes))

    def restore_state(self, folder: str | os.PathLike[str] | StateFolder) -> int:
        """Take saved state of this model back into the prefix cache, and return how many entries; see `Engine`.

        0 where the folder is not there yet. Raises `StateFolderError` for a path that is no folder, and what
        `Engine.restore_state` raises.
        """
        if not isinstance(folder, StateFolder) and not Path(folder).exists():
            # Nothing was saved yet; `save_state` makes the folder.
            return 0
        return self.engine.restore_state(self._state_folder(folder, DEFAULT_MAX_BYTES))

    @property
    def default_format(self) -> PromptFormat:
        """The prompt format of requests without a domain: chat where the model has a template."""
        return "chat" if self.backend.tokenizer.has_chat_template else "raw"

    def _score_stream(
        self, text: str, offset: DomainOffset | None, prompt_format: PromptFormat, timeout_s: float | None
    ) -> Stream:
        # One token more than the context holds: a longer text is refused by the engine, never cut.
        limit = self.backend.capabilities.context_tokens + 1
        examples, _ = lay_out([Document(text)], self.backend.tokenizer, prompt_format, max_tokens=limit)
        if not examples:
            raise InvalidRequestError("the text is too short to score; give at least a few words")
        example = examples[0]
        placements = () if offset is None else (place(offset, example.anchored_tokens),)
        first = len(example.token_ids) - len(example.targets)
        sampling = SamplingParams(max_tokens=0)
        return self.stream(Request(example.token_ids, placements, sampling, timeout_s, score_from=first))

    def _request(
        self,
        prompt: Sequence[int],
        domain: Domain,
        strength: float,
        formats: tuple[PromptFormat, ...],
        sampling: SamplingParams | None,
        timeout_s: float | None,
    ) -> Request:
        _check_strength(strength)
        offset = self.offset(domain)
        if offset is not None and offset.prompt_format not in formats:
            raise PromptFormatError(
                f"the offset of domain {offset.domain!r} was trained in prompt format {offset.prompt_format!r}, "
                f"but this request is laid out as {' or '.join(formats)}; train it with "
                f"'offset-runtime train {offset.domain} --format {formats[0]}'"
            )
        placements = () if offset is None or strength == 0 else (place(offset.scaled(strength), len(prompt)),)
        return Request(tuple(prompt), placements, sampling or SamplingParams(), timeout_s)

    def _state_folder(self, folder: str | os.PathLike[str] | StateFolder, max_bytes: int) -> StateFolder:
        if isinstance(folder, StateFolder):
            return folder
        known = self._folders.get(Path(folder))
        if known is None or known.max_bytes != max_bytes:
            made = StateFolder(folder, max_bytes)
            made.damaged |= set() if known is None else known.damaged
            self._folders[Path(folder)] = known = made
        return known

    def _check_authors(self, messages: Sequence[Message], authors: Mapping[int, DomainOffset | None]) -> None:
        for index, offset in authors.items():
            if not 0 <= index < len(messages):
                raise InvalidRequestError(f"turn_offsets names message {index} of {len(messages)}; expected its index")
            if offset is not None and offset.anchor != "turn":
                raise InvalidRequestError(
                    f"turn_offsets[{index}] is the sequence-anchored offset of domain {offset.domain!r}, which lay "
                    "at the start of its author's prompt; expected a turn-anchored one, or None"
                )
            if offset is not None:
                self._check(offset)

    def _check(self, offset: DomainOffset) -> None:
        # By digest and base: two files may hold one tensor and different identities.
        key = f"{offset.digest}|{offset.base.model_dump_json()}"
        if key not in self._checked:
            self.backend.identity.check(offset.base, domain=offset.domain)
            self._checked.add(key)


def _apart(own: Sequence[Placement], spoken: Sequence[Placement]) -> tuple[Placement, ...]:
    """All placements in order, without those of `spoken` that reach into `own` or a later one."""
    kept = list(own)
    for placement in sorted(spoken, key=lambda p: p.index, reverse=True):
        if all(placement.stop <= other.index or other.stop <= placement.index for other in kept):
            kept.append(placement)
    return tuple(sorted(kept, key=lambda p: p.index))


def _log_failure(event: Event) -> None:
    if isinstance(event, Exception):
        _log.debug("a prompt was not read ahead: %s", event)


def _check_strength(strength: object) -> None:
    if not isinstance(strength, Real):
        raise InvalidRequestError(
            f"strength {strength!r} is of type {type(strength).__name__}; expected a number, such as 1.0"
        )


def _check_name(domain: object) -> None:
    if not isinstance(domain, str):
        raise InvalidRequestError(
            f"domain {domain!r} is of type {type(domain).__name__}; expected the name of a domain, "
            "a DomainOffset, or None for the plain base"
        )

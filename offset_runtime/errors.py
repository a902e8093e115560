"""The errors of Offset Runtime.

    OffsetError
    ├── OffsetFileError            an offset file cannot be read or written
    ├── UnknownDomainError         no offset of that name
    ├── BaseModelMismatchError     the offset was made for another base model
    ├── PromptFormatError          the offset was trained in another prompt format
    ├── PlacementError             an offset cannot be placed in this prompt
    ├── ModelNotFoundError         the model name leads nowhere
    ├── UnsupportedModelError      the model cannot take an offset
    ├── ContextOverflowError       prompt + max_tokens exceeds the context
    ├── InvalidRequestError        a request that can never run
    │   └── ConstraintError        what the reply must look like cannot be held to
    ├── StateFolderError           a folder for saved state cannot be used or written
    ├── DocumentError              training or test documents cannot be used
    ├── WorkflowError              a workflow file is wrong
    ├── RequestCancelledError      the caller cancelled the request
    ├── DeadlineExceededError      the request did not end by its deadline
    ├── GenerationError            the model failed on this request
    ├── EngineClosedError          the engine was closed, or its thread died
    ├── OutOfMemoryError           the model's context does not fit in memory
    └── RetryableError             the same call may succeed later
        ├── QueueFullError         the engine's queue is full
        └── KVCacheFullError       the sequences that are open leave no room

Every message says what happened, what was found, what was expected and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OffsetError(Exception):
    """Root of every error this package raises on purpose."""


class OffsetFileError(OffsetError):
    """An offset file is missing, damaged, of an unknown version, or cannot be written."""


class UnknownDomainError(OffsetError):
    """A domain was asked for that has no offset."""

    def __init__(self, domain: str, known: Iterable[str], *, where: str = "") -> None:
        names = sorted(known)
        place = f" in {where}" if where else ""
        listing = f"known domains: {', '.join(names)}" if names else "no domain is registered"
        super().__init__(f"unknown domain {domain!r}{place}; {listing}{nearest_hint(domain, names)}")
        self.domain = domain


class BaseModelMismatchError(OffsetError):
    """The offset was made for another base model than the one that is loaded."""


class PromptFormatError(OffsetError):
    """The offset was trained in another prompt format than the request uses."""


class PlacementError(OffsetError):
    """An offset cannot be placed in this prompt."""


class ModelNotFoundError(OffsetError):
    """A model name, folder or file leads to no model."""


class UnsupportedModelError(OffsetError):
    """The model's embedding path cannot take an offset, so it is refused at load."""


class ContextOverflowError(OffsetError):
    """Prompt and output together would exceed the context of the model."""


class InvalidRequestError(OffsetError):
    """A request that can never run, whatever the load."""


class ConstraintError(InvalidRequestError):
    """A schema, regular expression or grammar is not valid, or no reply can be held to it while it is decoded."""


class StateFolderError(OffsetError):
    """A folder for saved state is none, or cannot be written. (What is damaged in it is no error: it is not used.)"""


class DocumentError(OffsetError):
    """Documents for training or evaluation cannot be used."""


class WorkflowError(OffsetError):
    """A workflow file is wrong; the message names file, line and the nearest valid name."""


class RequestCancelledError(OffsetError):
    """The caller cancelled the request before it ended."""


class DeadlineExceededError(OffsetError):
    """The request did not end by its deadline."""


class GenerationError(OffsetError):
    """The model failed on this request; other requests are untouched."""


class EngineClosedError(OffsetError):
    """The engine was closed, or its thread died; the message says which."""


class OutOfMemoryError(OffsetError):
    """The model, or the state of its sequences, does not fit in memory as it was asked for."""


class RetryableError(OffsetError):
    """A condition that passes: the same call may succeed later."""


class QueueFullError(RetryableError):
    """The engine's bounded queue is full."""


class KVCacheFullError(RetryableError):
    """The sequences that are open leave no room for more tokens, or for one more sequence."""


def nearest_hint(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the valid name nearest to `name`, or an empty string."""
    spelled = {choice.casefold(): choice for choice in valid}
    match = difflib.get_close_matches(name.casefold(), list(spelled), n=1, cutoff=0.5)
    return f"; did you mean {spelled[match[0]]!r}?" if match else ""

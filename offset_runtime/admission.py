"""What a request must be like to run at all; checked before it is queued."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from offset_runtime.backends.base import Capabilities
from offset_runtime.constrain import Constraint
from offset_runtime.errors import ContextOverflowError, InvalidRequestError
from offset_runtime.placement import check_placements
from offset_runtime.request import Request, Reuse


def check_request(request: Request, capabilities: Capabilities, hidden_size: int) -> None:
    """Raise for a request that can never run on a model of `hidden_size` with these `capabilities`.

    Raises `InvalidRequestError`, `ContextOverflowError` where prompt and reply do not fit, and `PlacementError`.
    """
    prompt, reply = len(request.prompt_ids), request.sampling.max_tokens
    if prompt == 0:
        raise InvalidRequestError("the prompt is empty; it needs at least one token")
    limits = [capabilities.context_tokens, capabilities.kv_capacity_tokens]
    context = min(limit for limit in limits if limit is not None)
    if prompt + reply > context:
        raise ContextOverflowError(
            f"prompt of {prompt} tokens + max_tokens of {reply} = {prompt + reply} exceeds the context of "
            f"{context} tokens; shorten the prompt or lower max_tokens to at most {max(context - prompt, 0)}"
        )
    _check_values(request)
    _check_reuse(request.reuse)
    _check_constraint(request.constraint)
    check_placements(request.placements, prompt, hidden_size)


def _check_values(request: Request) -> None:
    prompt = request.prompt_ids
    first: Any = request.score_from
    timeout_s: Any = request.timeout_s
    foreign: list[Any] = [token for token in prompt if not isinstance(token, int | np.integer)]
    if foreign:
        raise InvalidRequestError(
            f"prompt_ids hold {foreign[0]!r} of type {type(foreign[0]).__name__}; expected integers, as encode() gives"
        )
    if first is not None and not isinstance(first, int | np.integer):
        raise InvalidRequestError(f"score_from={first!r} is a {type(first).__name__}; expected a position, or None")
    if first is not None and first < 1:
        raise InvalidRequestError("score_from must be at least 1: nothing precedes the first token")
    if first is not None and first >= len(prompt):
        raise InvalidRequestError(
            f"score_from={first} leaves nothing to score in a prompt of {len(prompt)} tokens; "
            f"expected at most {len(prompt) - 1}"
        )
    # Not a number is never greater, so it is refused too.
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
        raise InvalidRequestError(
            f"timeout_s={timeout_s!r} can never be kept; expected seconds greater than 0, or None for no limit"
        )


def _check_constraint(constraint: object) -> None:
    if constraint is not None and not isinstance(constraint, Constraint):
        raise InvalidRequestError(
            f"constraint={constraint!r} is of type {type(constraint).__name__}; expected a Constraint, for example "
            "Constraint.json_schema(…), or None"
        )


def _check_reuse(reuse: object) -> None:
    if reuse is None:
        return
    if not isinstance(reuse, Reuse):
        raise InvalidRequestError(f"reuse={reuse!r} is of type {type(reuse).__name__}; expected a Reuse, or None")
    upcoming: Any = reuse.upcoming
    steps = upcoming.values() if isinstance(upcoming, Mapping) else [None]
    if not (isinstance(reuse.session, str) and isinstance(reuse.reader, str)) or any(
        not isinstance(step, int | np.integer) or step < 1 for step in steps
    ):
        raise InvalidRequestError(
            f"{reuse!r} does not say who reads next; expected texts for session and reader, and for upcoming a mapping "
            'from readers to steps (1: the next), for example {"editor": 1}'
        )

"""retry_policy: which failures of a LangGraph node are worth another try."""

from __future__ import annotations

from langgraph.types import RetryPolicy

from offset_runtime.errors import InvalidRequestError, RetryableError

_LONGEST_WAIT_S = 8.0


def retry_policy(*, max_attempts: int = 3, first_wait_s: float = 0.5) -> RetryPolicy:
    """A policy for ``add_node(..., retry_policy=...)`` that retries `RetryableError` (a full queue) and nothing else.

    LangGraph's own default would run a node again after an unknown domain or a context that is too small, which fail
    alike each time. `max_attempts`: runs of the node, the first one included. `first_wait_s`: seconds before the second
    run; each further wait is twice as long, up to 8 s, and up to a second longer, so that branches that failed
    together do not come back together. It comes on top of the `max_retries` of a `ChatOffset`, which wait for a full
    queue within the node, and also covers what a reply meets once it is under way. Tokens that were streamed before
    such a failure are streamed anew.

    Raises `InvalidRequestError` for values out of their range.
    """
    if isinstance(max_attempts, bool) or not isinstance(max_attempts, int) or max_attempts < 1:
        raise InvalidRequestError(f"max_attempts={max_attempts!r}; expected how often to run the node, at least 1")
    if isinstance(first_wait_s, bool) or not isinstance(first_wait_s, int | float) or not 0 <= first_wait_s < 3600:
        raise InvalidRequestError(f"first_wait_s={first_wait_s!r}; expected seconds, from 0 to an hour")
    return RetryPolicy(
        initial_interval=first_wait_s,
        max_interval=max(_LONGEST_WAIT_S, first_wait_s),
        max_attempts=max_attempts,
        # A wait of none is for tests, and stays none.
        jitter=first_wait_s > 0,
        retry_on=RetryableError,
    )

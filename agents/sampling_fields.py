"""The sampling fields of models and agents: those of `SamplingParams`, None where its default holds."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import PydanticKnownError

from offset_runtime.sampling import SamplingParams

# LangChain has its own forms of these two.
_FORMS_DIFFER = ("stop", "logprobs")

SAMPLING_FIELDS = tuple(name for name in SamplingParams.model_fields if name not in _FORMS_DIFFER)


def check_limits(name: str, value: Any) -> None:
    """Check `value` against the limits that `SamplingParams` sets to its field `name`; None passes.

    To be called in a pydantic validator: raises `PydanticKnownError`, which is reported as the error of
    the field that is being validated.
    """
    if value is None:
        return
    try:
        SamplingParams(**{name: value})
    except ValidationError as error:
        problem: Any = error.errors(include_url=False)[0]
        raise PydanticKnownError(problem["type"], problem.get("ctx")) from error

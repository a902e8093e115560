"""What it costs to hold a reply to a JSON schema."""

from __future__ import annotations

from dataclasses import replace

from offset_runtime.bench.case import Case, Setting
from offset_runtime.bench.pairs import Ratio, measure
from offset_runtime.bench.workload import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    check_room,
    endless_engine,
    prompt,
    request,
    run_together,
)
from offset_runtime.constrain import Constraint
from offset_runtime.runtime import OffsetRuntime

# Texts, numbers and choices by turns, and so many that no reply is complete before its most tokens.
_FIELDS = {
    f"{part}_{name}": kind
    for part in ("first", "second", "third", "fourth")
    for name, kind in (
        ("headline", {"type": "string"}),
        ("priority", {"type": "integer", "minimum": 1, "maximum": 100}),
        ("section", {"enum": ["news", "culture", "sport", "weather"]}),
        ("keywords", {"type": "array", "items": {"type": "string"}, "minItems": 2}),
    )
}
FORM = {"type": "object", "properties": _FIELDS, "required": list(_FIELDS), "additionalProperties": False}


def constrained_step(case: Case, setting: Setting, runtime: OffsetRuntime) -> Ratio:
    """Seconds a token of one request's decode, in the engine, under a JSON schema and under none."""
    check_room(runtime.backend, PROMPT_TOKENS + OUTPUT_TOKENS)
    free = request(prompt(runtime.backend.tokenizer, PROMPT_TOKENS))
    held = replace(free, constraint=Constraint.json_schema(FORM))
    with endless_engine(runtime.backend) as engine:

        def seconds(constrained: bool) -> float:
            group = run_together(engine, [held if constrained else free])
            return group.decode_s / group.decode_tokens

        return measure(
            case.name,
            lambda: seconds(True),
            lambda: seconds(False),
            goal=case.goal,
            pairs=setting.pairs,
            progress=setting.progress,
        )

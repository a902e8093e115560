"""Any tree of agents gets from the prefix cache what cold runs give: invariants 4 and 5, on the real base model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from agent_trees import Played, Step, Tree, Watched, steps
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from near_ties import parted

from offset_runtime import DomainOffset, EngineSettings
from offset_runtime.backends.base import Backend
from offset_runtime.engine import Engine
from offset_runtime.stream import Stream

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

MakeOffset = Callable[..., DomainOffset]

NO_CACHE = EngineSettings(cache_bytes=0)
HISTORY = "The harbour of the old town is to be rebuilt after the storm."
WORDS = (" Leaves are green", " A contract binds both sides", " Then the ship left", ".")
SETTINGS = st.builds(
    EngineSettings,
    max_running=st.just(4),
    max_step_tokens=st.sampled_from([12, 40, 80]),
    # Room for a single sequence, for a few, and for all.
    cache_bytes=st.sampled_from([4 * 2**20, 16 * 2**20, 2**29, 2**29]),
)


def tree_of(backend: Backend, make_offset: MakeOffset) -> Tree:
    """Trees over one history, with random offsets of about the size of trained ones in four domains."""

    def offset(domain: int, length: int, anew: bool) -> DomainOffset | None:
        if domain > 3:
            return None
        anchor = "turn" if domain % 2 else "sequence"
        return make_offset(backend.identity, f"d{domain}", anchor=anchor, seed=domain + 100 * anew, scale=0.1)

    encode = backend.tokenizer.encode
    return Tree(tuple(encode(HISTORY)), [encode(word) for word in WORDS], offset, most_tokens=50)


def check_against_cold(backend: Backend, one: Played, cold: Engine) -> None:
    expected = Stream(cold, one.request).result()
    if one.completion is None:
        assert parted(backend, one.request, one.token_ids, expected.token_ids[: len(one.token_ids)]) is None
        return
    assert parted(backend, one.request, one.token_ids, expected.token_ids) is None
    np.testing.assert_allclose(one.completion.prompt_logprobs, expected.prompt_logprobs, atol=1e-3)


def test_every_reply_in_a_tree_of_agents_is_what_a_cold_run_gives(smollm: Backend, make_offset: MakeOffset) -> None:
    tally: Counter[str] = Counter()
    kinds = steps(least_kept=10, most_kept=40, words=len(WORDS), most_words=4, replies=st.just(3))

    @given(tree=st.lists(kinds, min_size=13, max_size=15), renewed=st.integers(5, 12), engine_settings=SETTINGS)
    @settings(max_examples=8, derandomize=True, database=None, phases=[Phase.generate])
    def check(tree: list[Step], renewed: int, engine_settings: EngineSettings) -> None:
        watched = Watched(smollm)
        with Engine(watched, engine_settings) as engine:  # type: ignore[arg-type]
            played = agents.play(engine, watched, tree, renewed)
            tally["evictions"] += engine.cache_figures.evictions
        assert smollm.state_bytes() == 0
        with Engine(smollm, NO_CACHE) as cold:
            for one in played:
                assert 10 < len(one.request.prompt_ids) <= 50
                one.count(tally)
                check_against_cold(smollm, one, cold)

    agents = tree_of(smollm, make_offset)
    check()
    assert tally["requests"] >= 100
    # Else the trees would prove little.
    assert tally["hits"] > 0.5 * tally["completed"] > 0.25 * tally["requests"]
    assert min(tally[what] for what in ("with an earlier offset", "stopped before a token", "evictions")) >= 5

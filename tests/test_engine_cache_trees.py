"""Any tree of agents gets from the prefix cache what cold runs give: invariants 4 and 5, on the fake backend."""

from __future__ import annotations

from collections import Counter

import numpy as np
from agent_trees import Played, Step, Tree, Watched, steps
from hypothesis import given, settings
from hypothesis import strategies as st
from strict_backend import StrictBackend

from offset_runtime import DomainOffset, EngineSettings
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.engine import Engine
from offset_runtime.stream import Stream

IDENTITY = FakeBackend().identity
NO_CACHE = EngineSettings(cache_bytes=0)


def numbered_offset(domain: int, length: int, anew: bool) -> DomainOffset | None:
    """Two sequence-anchored domains, two turn-anchored ones, and two agents without; none longer than the prompt."""
    if domain > 3:
        return None
    seed, anchor = domain + (100 if anew else 0), "turn" if domain % 2 else "sequence"
    rows = np.random.default_rng(seed).normal(size=(min(3, length), IDENTITY.hidden_size)).astype(np.float32)
    return DomainOffset(f"d{domain}", rows, anchor, "chat", IDENTITY)  # type: ignore[arg-type]


# Few different tokens, so that turns often begin alike.
TREE = Tree((66,) * 10, [[65], [66], [67]], numbered_offset, most_tokens=70)
LIMITS = st.fixed_dictionaries(
    {
        "kv_capacity_tokens": st.sampled_from([None, None, 90, 150, 300]),
        "max_sequences": st.sampled_from([None, None, 1, 4, 9, 20]),
    }
)
SETTINGS = st.builds(
    EngineSettings,
    max_running=st.just(3),
    max_step_tokens=st.integers(1, 40),
    cache_bytes=st.sampled_from([600, 3_000, 20_000, 100_000, 10**9, 10**9]),
    snapshot_tokens=st.sampled_from([1, 4, 8, 64]),
)


def check_against_cold(one: Played, cold: Engine, tally: Counter[str]) -> None:
    one.count(tally)
    expected = Stream(cold, one.request).result()
    if one.completion is None:
        assert tuple(one.token_ids) == expected.token_ids[: len(one.token_ids)]
        return
    assert one.completion.token_ids == expected.token_ids
    np.testing.assert_array_equal(one.completion.prompt_logprobs, expected.prompt_logprobs)
    assert one.completion.usage.cached_tokens < len(one.request.prompt_ids)


def play_trees(cold: Engine, *, truncate: bool) -> Counter[str]:
    """Check many trees on a backend that can cut its state or not; return what was met."""
    tally: Counter[str] = Counter()

    @given(
        tree=st.lists(steps(most_kept=60, words=3, most_words=6, replies=st.integers(0, 5)), min_size=14, max_size=24),
        renewed=st.integers(4, 24),
        limits=LIMITS,
        engine_settings=SETTINGS,
    )
    @settings(max_examples=80, derandomize=True, database=None)
    def check(tree: list[Step], renewed: int, limits: dict[str, int | None], engine_settings: EngineSettings) -> None:
        backend = StrictBackend(context_tokens=80, truncate=truncate, **limits)
        watched = Watched(backend)
        with Engine(watched, engine_settings) as engine:  # type: ignore[arg-type]
            for one in TREE.play(engine, watched, tree, renewed):
                check_against_cold(one, cold, tally)
            figures, most = engine.cache_figures, backend.capabilities.max_sequences
            assert figures.bytes == backend.state_bytes() <= engine_settings.cache_bytes
            assert figures.entries == backend.open_sequences
            assert most is None or figures.entries <= max(0, most - engine_settings.max_running)
            tally["evictions"] += figures.evictions
        assert backend.open_sequences == 0

    check()
    return tally


def test_every_reply_in_any_tree_of_agents_is_what_a_cold_run_gives() -> None:
    with Engine(FakeBackend(), NO_CACHE) as cold:
        tallies = [play_trees(cold, truncate=truncate) for truncate in (True, False)]
    assert sum(tally["requests"] for tally in tallies) >= 2_000
    for tally in tallies:
        # Else the trees would prove little.
        assert tally["completed"] > 0.5 * tally["requests"]
        assert tally["hits"] > 0.2 * tally["completed"]
        assert min(tally[what] for what in ("with an earlier offset", "stopped before a token", "evictions")) > 50
        assert tally["stopped in its reply"] > 10

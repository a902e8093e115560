"""Domains are ranked by how much likelier than the base they find a text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import Console

from offset_runtime import DomainOffset, OffsetRuntime
from offset_runtime.errors import UnknownDomainError
from offset_runtime.ranking import rank_domains, ranking_table

MakeOffset = Callable[..., DomainOffset]

TEXT = "The court held that the clause applies."


@pytest.fixture
def runtime(fake_runtime: OffsetRuntime, make_offset: MakeOffset) -> OffsetRuntime:
    identity = fake_runtime.backend.identity
    fake_runtime.register(make_offset(identity, "legal", seed=1))
    fake_runtime.register(make_offset(identity, "code", seed=2))
    fake_runtime.register(make_offset(identity, "raw", seed=3, anchor="sequence", prompt_format="raw"))
    return fake_runtime


def test_scores_are_those_of_the_runtime(runtime: OffsetRuntime) -> None:
    ranked = {score.domain: score for score in rank_domains(runtime, [TEXT], ["legal", "code"])}
    plain, legal, code = runtime.score(TEXT, [None, "legal", "code"])
    for score in (plain, legal, code):
        found = ranked[score.domain]
        assert (found.tokens, found.logprob, found.base_logprob) == (score.tokens, score.logprob, plain.logprob)
        assert found.logprob_per_token == pytest.approx(score.logprob / score.tokens)
        assert found.difference_per_token == pytest.approx((score.logprob - plain.logprob) / score.tokens)


def test_the_likeliest_domain_comes_first_and_the_base_lies_at_zero(runtime: OffsetRuntime) -> None:
    ranked = rank_domains(runtime, [TEXT], ["legal", "code"])
    differences = [score.difference_per_token for score in ranked]
    assert differences == sorted(differences, reverse=True)
    assert [score.difference_per_token for score in ranked if score.domain is None] == [0.0]


def test_each_prompt_format_is_compared_with_the_base_in_that_format(runtime: OffsetRuntime) -> None:
    ranked = rank_domains(runtime, [TEXT], ["legal", "raw"])
    base = {score.prompt_format: score.logprob for score in ranked if score.domain is None}
    assert base.keys() == {"chat", "raw"}
    assert base["chat"] != base["raw"]
    for score in ranked:
        assert score.base_logprob == base[score.prompt_format]


def test_several_texts_add_up(runtime: OffsetRuntime) -> None:
    other = "for name in names: print(name)"
    [both] = [s for s in rank_domains(runtime, [TEXT, other], ["legal"]) if s.domain]
    parts = [s for text in (TEXT, other) for s in rank_domains(runtime, [text], ["legal"]) if s.domain]
    assert both.tokens == sum(part.tokens for part in parts)
    assert both.logprob == pytest.approx(sum(part.logprob for part in parts))


def test_without_domains_the_base_stands_alone(runtime: OffsetRuntime) -> None:
    [score] = rank_domains(runtime, [TEXT], [])
    assert (score.domain, score.prompt_format, score.difference_per_token) == (None, "chat", 0.0)


def test_an_unknown_domain_names_the_nearest(runtime: OffsetRuntime) -> None:
    with pytest.raises(UnknownDomainError, match="did you mean 'legal'"):
        rank_domains(runtime, [TEXT], ["legale"])


def test_the_table_has_a_line_a_score(runtime: OffsetRuntime) -> None:
    ranked = rank_domains(runtime, [TEXT], ["legal", "code"])
    console = Console(width=120)
    with console.capture() as capture:
        console.print(ranking_table(ranked, "fake on fake"))
    shown = capture.get()
    assert "plain base" in shown
    assert f"{ranked[0].difference_per_token:+.4f}" in shown

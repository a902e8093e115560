"""One tree of errors, as its module draws it."""

from __future__ import annotations

import inspect

import pytest

from offset_runtime import errors
from offset_runtime.errors import OffsetError, RetryableError, UnknownDomainError, nearest_hint


def test_every_error_is_in_the_tree_that_the_module_draws() -> None:
    defined = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__}
    drawn = {line.split("── ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "── " in line}
    assert drawn | {"OffsetError"} == defined


def test_one_root_catches_all_and_only_passing_conditions_are_retryable() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
    assert all(issubclass(kind, OffsetError) for kind in kinds)
    retryable = {kind.__name__ for kind in kinds if issubclass(kind, RetryableError)}
    assert retryable == {"RetryableError", "QueueFullError", "KVCacheFullError"}


@pytest.mark.parametrize(
    ("domain", "known", "message"),
    [
        ("leagl", ["news", "legal"], "unknown domain 'leagl'; known domains: legal, news; did you mean 'legal'?"),
        ("zzz", ["news", "legal"], "unknown domain 'zzz'; known domains: legal, news"),
        ("legal", [], "unknown domain 'legal'; no domain is registered"),
    ],
)
def test_an_unknown_domain_names_the_known_ones_and_the_nearest(domain: str, known: list[str], message: str) -> None:
    error = UnknownDomainError(domain, known)
    assert str(error) == message
    assert error.domain == domain


def test_the_nearest_name_is_hinted_at_only_when_it_is_near() -> None:
    assert nearest_hint("edgse", ["edges", "agents"]) == "; did you mean 'edges'?"
    assert nearest_hint("colour", ["edges", "agents"]) == ""
    assert nearest_hint("x", []) == ""

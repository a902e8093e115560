"""The fake backend keeps the contract, and answers as its script says."""

from __future__ import annotations

import pytest

from offset_runtime.backends import conformance
from offset_runtime.backends.fake import FakeBackend


@pytest.mark.parametrize("behaviour", conformance.BEHAVIOURS)
def test_contract(behaviour: str) -> None:
    conformance.check(behaviour, FakeBackend)

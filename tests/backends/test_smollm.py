"""The real base model keeps the contract too."""

from __future__ import annotations

import pytest

from offset_runtime.backends import conformance
from offset_runtime.backends.base import Backend

pytestmark = pytest.mark.real_model


@pytest.mark.parametrize("behaviour", conformance.BEHAVIOURS)
def test_contract(behaviour: str, smollm: Backend) -> None:
    conformance.check(behaviour, lambda: smollm)

"""What importing offset_runtime.agents offers and costs."""

from __future__ import annotations

import subprocess
import sys

import offset_runtime.agents


def test_importing_loads_no_torch() -> None:
    code = "import sys, offset_runtime.agents; print(sorted({'torch', 'transformers'} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_public_names_are_sorted_and_exist() -> None:
    assert offset_runtime.agents.__all__ == sorted(offset_runtime.agents.__all__)
    assert all(hasattr(offset_runtime.agents, name) for name in offset_runtime.agents.__all__)

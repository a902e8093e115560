"""What the package offers by its name alone, and what importing it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import offset_runtime


def test_all_is_sorted_and_complete() -> None:
    public = [
        name for name, value in vars(offset_runtime).items() if not name.startswith("_") and not inspect.ismodule(value)
    ]
    assert sorted(public) == offset_runtime.__all__
    assert offset_runtime.__all__ == sorted(offset_runtime.__all__)


def test_importing_the_package_loads_no_model_library_and_no_framework() -> None:
    code = (
        "import sys, offset_runtime\n"
        "heavy = {'torch', 'transformers', 'langchain', 'langchain_core', 'langgraph', 'matplotlib', 'gguf'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_fake_runtime_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from offset_runtime import OffsetRuntime, Request, SamplingParams\n"
        "with OffsetRuntime.load('fake') as runtime:\n"
        "    request = Request((72, 105), sampling=SamplingParams(max_tokens=3))\n"
        "    assert runtime.run(request).usage.output_tokens <= 3\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

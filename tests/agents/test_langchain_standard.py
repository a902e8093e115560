"""LangChain's own tests of chat models: on the real base with both backends, and on a scripted one.

`test_serdes` skips itself (LangChain serialises classes of its own packages only), and so do the tests of images,
audio and PDF, which the model does not read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from offset_runtime import OffsetRuntime
from offset_runtime.agents import ChatOffset
from offset_runtime.backends.base import Backend
from offset_runtime.backends.fake import FakeBackend
from offset_runtime.backends.llama_cpp import LlamaCppBackend
from offset_runtime.backends.torch import TorchBackend

PARAMS = {"model": "smollm2-135m", "max_tokens": 100}
# Where it writes at length so small a base says one thing for ever, and its JSON never ends.
AT_LENGTH = ("test_structured_output", "test_json_mode")
TOO_SMALL = "SmolLM2-135M calls no tool of its own accord: at 20 questions like this one in none, in any format"


class TestWithoutABase(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOffset

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2-135m"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        # There is no key to find in the environment.
        return {"OFFSET_RUNTIME_CACHE": "cache"}, self.chat_model_params, {"model": "smollm2-135m"}


class Standard(ChatModelIntegrationTests):
    """What the model can, for the tests that need a reply."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOffset

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return PARAMS

    @property
    def model_override_value(self) -> str:
        return "smollm2-135m#law"

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:  # type: ignore[override]
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    @property
    def enable_vcr_tests(self) -> bool:
        return True

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        raise AssertionError("replaced below, where the model is known")

    @pytest.mark.xfail(reason=TOO_SMALL)
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    def on(self, backend: Backend, make_offset: Any, request: Any) -> ChatOffset:
        runtime = OffsetRuntime(backend)
        runtime.register(make_offset(backend.identity, "law", scale=0.05))
        fields = {
            **self.standard_chat_model_params,
            **self.chat_model_params,
            **(getattr(request, "param", None) or {}),
        }
        if request.node.name.startswith(AT_LENGTH):
            fields["repetition_penalty"] = 1.15
        model = ChatOffset(**fields, runtime=runtime)

        def read_twice(*, stream: bool = False) -> Any:
            for _ in range(2):
                parts = list(model.stream("Hello, my name is Bob.")) if stream else [model.invoke("Hello, I am Bob.")]
            reply = parts[0]
            for part in parts[1:]:
                reply += part  # type: ignore[assignment]
            return reply

        self.invoke_with_cache_read_input = read_twice  # type: ignore[method-assign]
        return model


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
class TestOnTorch(Standard):
    @pytest.fixture
    def model(self, request: Any, smollm_torch: TorchBackend, make_offset: Any) -> Iterator[BaseChatModel]:
        model = self.on(smollm_torch, make_offset, request)
        yield model
        model.load_runtime().engine.close()


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
class TestOnLlamaCpp(Standard):
    @pytest.fixture
    def model(self, request: Any, smollm_llama: LlamaCppBackend, make_offset: Any) -> Iterator[BaseChatModel]:
        model = self.on(smollm_llama, make_offset, request)
        yield model
        model.load_runtime().engine.close()


def tool_tuned(prompt: str) -> str:
    """What a base that knows tools would say: one call for a question about the weather, then the answer."""
    _, _, after = prompt.rpartition("<|im_start|>user")
    if "get_weather" in prompt and "<tool_response>" not in after:
        call = {"name": "get_weather", "arguments": {"location": "San Francisco, CA"}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    return "It is sunny."


@pytest.mark.parametrize("template_knows_tools", [False, True])
def test_an_agents_loop_on_a_base_whose_replies_are_those_of_one_trained_on_tools(template_knows_tools: bool) -> None:
    class Loop(ChatModelIntegrationTests):
        @property
        def chat_model_class(self) -> type[BaseChatModel]:
            return ChatOffset

    with OffsetRuntime(FakeBackend(tool_tuned, tools=template_knows_tools)) as runtime:
        Loop().test_agent_loop(ChatOffset(model="fake", runtime=runtime))

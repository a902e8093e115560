"""The fields of a model: what they refuse, where offsets come from, and how the base is shared."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from offset_runtime import DomainOffset, LlamaCppOptions, ModelSpec, OffsetRuntime
from offset_runtime.agents import ChatOffset, OffsetLLM
from offset_runtime.errors import (
    BaseModelMismatchError,
    InvalidRequestError,
    OffsetFileError,
    UnknownDomainError,
)


def test_constructing_loads_no_model_and_reads_no_file(loads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DomainOffset, "load", lambda path: pytest.fail(f"read {path}"))

    ChatOffset(model="no-such-model", domain="law", store="no-such-folder")
    ChatOffset(model="fake", domain="law").for_domain("news")

    assert loads == []


@pytest.mark.parametrize("kind", [ChatOffset, OffsetLLM])
def test_an_empty_model_name_is_refused_and_is_no_folder(kind: Any) -> None:
    for name in ("", "  "):
        with pytest.raises(InvalidRequestError, match="is empty; expected a base model"):
            kind(model=name)
    with pytest.raises(InvalidRequestError, match="is empty"):
        kind(model="fake").configured({"model": ""})


def test_a_path_with_a_hash_is_split_at_the_domain_only(tmp_path: Path) -> None:
    path = tmp_path / "c#" / "m.gguf"
    path.parent.mkdir()
    path.touch()

    plain, law = ChatOffset(model=str(path)), ChatOffset(model=f"{path}#law")

    assert (plain.model, plain.domain) == (str(path), None)
    assert (law.model, law.domain) == (str(path), "law")
    assert law.for_domain("news").address == f"{path}#news"


@pytest.mark.parametrize("kind", [ChatOffset, OffsetLLM])
def test_a_misspelled_field_is_refused_with_the_nearest_name(kind: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"{kind.__name__} has no field 'domian'; did you mean 'domain'"):
        kind(model="fake", domian="law")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -0.5}, r"temperature\n.*greater than or equal to 0"),
        ({"temperature": float("inf")}, r"temperature\n.*finite"),
        ({"max_tokens": -1}, r"max_tokens\n.*greater than or equal to 0"),
        ({"top_p": 0}, r"top_p\n.*greater than 0"),
        ({"seed": -1}, r"seed\n.*greater than or equal to 0"),
        ({"stop": [""]}, r"stop\n.*stop string must not be empty"),
        ({"top_logprobs": 101, "logprobs": True}, r"top_logprobs\n.*less than or equal to 100"),
        ({"top_logprobs": 3}, "top_logprobs=3 needs logprobs=True"),
        ({"timeout": -1}, r"timeout\n.*greater than 0"),
        ({"backend": "foo"}, r"backend\n.*'auto', 'torch', 'llama_cpp' or 'fake'"),
        ({"llama_cpp": {"n_ctx": 0}}, r"llama_cpp\.n_ctx\n.*greater than or equal to 1"),
        ({"llama_cpp": {"type_v": "q8_0", "flash_attn": False}}, "type_v=q8_0 needs flash attention"),
    ],
)
@pytest.mark.parametrize("kind", [ChatOffset, OffsetLLM])
def test_values_out_of_range_are_refused_as_pydantic_does(kind: Any, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        kind(**{"model": "fake", **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "fake#"}, "not of the form 'base#domain'"),
        ({"model": "#law"}, "not of the form 'base#domain'"),
        ({"model": "fake#law", "domain": "news"}, "names domain 'law', but domain='news'"),
    ],
)
def test_an_address_that_cannot_work_is_refused_at_once(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        ChatOffset(**{"model": "fake", **fields})


def test_the_models_name_may_hold_the_domain() -> None:
    model = ChatOffset(model="fake#law")

    assert (model.model, model.domain, model.address) == ("fake", "law", "fake#law")
    assert ChatOffset(model="fake#law", domain=None).domain == "law"


def test_for_domain_keeps_everything_else(fake_runtime: OffsetRuntime) -> None:
    model = ChatOffset(model="fake", domain="law", runtime=fake_runtime, temperature=0.5, stop=["x"], tags=["mine"])

    other = model.for_domain("news")

    assert other.domain == "news"
    assert other.load_runtime() is fake_runtime
    assert (other.temperature, other.stop, other.tags) == (0.5, ["x"], ["mine"])
    assert "streaming" not in other.model_fields_set
    assert model.domain == "law"


def test_instances_with_equal_model_arguments_share_one_base(loads: list[str]) -> None:
    law, news, llm = ChatOffset(model="fake#law"), ChatOffset(model="fake", domain="news"), OffsetLLM(model="fake")

    assert law.load_runtime() is news.load_runtime() is llm.load_runtime()
    assert len(loads) == 1
    assert ChatOffset(model="fake", dtype="float64").load_runtime() is not law.load_runtime()


def test_options_of_llama_cpp_are_part_of_what_is_shared(loads: list[str]) -> None:
    plain, small = ChatOffset(model="fake"), ChatOffset(model="fake", llama_cpp={"n_ctx": 64})

    same = OffsetLLM(model="fake", llama_cpp=LlamaCppOptions(n_ctx=64))

    assert small.load_runtime() is same.load_runtime() is small.for_domain("law").load_runtime()
    assert small.load_runtime() is not plain.load_runtime()
    assert len(loads) == 2


def test_options_of_llama_cpp_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    specs: list[ModelSpec] = []
    monkeypatch.setattr("offset_runtime.agents.connection.shared_runtimes.get", specs.append)

    ChatOffset(model="m.gguf", backend="llama_cpp", llama_cpp={"n_ctx": 64}).load_runtime()

    assert specs == [ModelSpec(base="m.gguf", backend="llama_cpp", llama_cpp=LlamaCppOptions(n_ctx=64))]


@pytest.mark.parametrize("kind", [ChatOffset, OffsetLLM])
def test_a_misspelled_option_of_llama_cpp_is_refused_with_the_nearest_name(kind: Any) -> None:
    said = f"llama_cpp of {kind.__name__} has no option 'n_cxt'; did you mean 'n_ctx'"
    with pytest.raises(InvalidRequestError, match=said):
        kind(model="fake", llama_cpp={"n_cxt": 64})


def test_replies_under_other_options_of_llama_cpp_are_not_one_in_langchains_cache() -> None:
    plain, quantised = ChatOffset(model="fake"), ChatOffset(model="fake", llama_cpp={"type_k": "q8_0"})

    assert plain._identifying_params != quantised._identifying_params


def test_another_base_named_by_a_call_is_loaded(loads: list[str], fake_runtime: OffsetRuntime) -> None:
    model = ChatOffset(model="fake", runtime=fake_runtime, max_tokens=2)

    model.invoke("hello", model="fake")
    assert loads == []
    reply = model.invoke("hello", model="another")

    assert len(loads) == 1
    assert reply.response_metadata["model_name"] == "another"


async def test_the_base_loads_away_from_the_event_loop(loads: list[str]) -> None:
    await ChatOffset(model="fake", max_tokens=2).ainvoke("hello")

    assert len(loads) == 1
    assert loads[0] != threading.current_thread().name


async def test_offset_files_are_read_away_from_the_event_loop(
    loads: list[str], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    load = DomainOffset.load

    def spy(path: Any) -> DomainOffset:
        read.append(threading.current_thread().name)
        return load(path)

    monkeypatch.setattr(DomainOffset, "load", spy)
    await ChatOffset(model="fake", domain="law", store=store, max_tokens=2).ainvoke("hello")
    assert [chunk async for chunk in ChatOffset(model="fake", store=store, max_tokens=2).astream("hi", domain="law")]
    await OffsetLLM(model="fake", store=store).for_domain("law")._read_offset({})

    assert len(read) == 3
    assert threading.current_thread().name not in read


def test_an_offset_file_is_read_once_for_a_model_and_its_domains(
    loads: list[str], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ChatOffset(model="fake", domain="law", store=store, max_tokens=2)
    model.invoke("hello")
    monkeypatch.setattr(DomainOffset, "load", lambda path: pytest.fail("read again"))

    model.invoke("hello")
    model.for_domain(None).for_domain("law").invoke("hello")


def test_offsets_come_from_named_files_and_else_from_the_store(loads: list[str], store: Path) -> None:
    model = ChatOffset(model="fake", store=store, domains={"statutes": store / "law.safetensors"}, max_tokens=8)
    law, statutes = model.for_domain("law").invoke("hello"), model.for_domain("statutes").invoke("hello")

    assert law.content == statutes.content
    assert law.response_metadata["offset_digest"] == statutes.response_metadata["offset_digest"]
    assert statutes.response_metadata["domain"] == "statutes"
    assert [model.for_domain(domain).offset().domain for domain in ("law", "statutes")] == ["law", "statutes"]


def test_a_named_file_wins_over_the_store_and_the_runtime(
    store: Path, fake_runtime: OffsetRuntime, make_offset: Any
) -> None:
    fake_runtime.register(make_offset(fake_runtime.backend.identity, "law", seed=9))
    news = DomainOffset.load(store / "news.safetensors")
    fields: dict[str, Any] = {"model": "fake", "domain": "law", "store": store, "runtime": fake_runtime}

    assert ChatOffset(**fields, domains={"law": store / "news.safetensors"}).offset() == news
    assert ChatOffset(**fields).offset() == fake_runtime.offsets["law"]


def test_two_models_may_mean_different_files_by_one_name(loads: list[str], store: Path) -> None:
    one = ChatOffset(model="fake", domain="x", domains={"x": store / "law.safetensors"}, max_tokens=8)
    two = ChatOffset(model="fake", domain="x", domains={"x": store / "news.safetensors"}, max_tokens=8)

    assert one.invoke("hello").content != two.invoke("hello").content
    assert len(loads) == 1


async def test_an_unknown_domain_is_an_error_with_the_nearest_name(loads: list[str], store: Path) -> None:
    model = ChatOffset(model="fake", domain="lwa", store=store, domains={"statutes": store / "law.safetensors"})

    with pytest.raises(UnknownDomainError, match="known domains: law, news, statutes; did you mean 'law'"):
        model.invoke("hello")
    with pytest.raises(UnknownDomainError, match="lwa"):
        await model.ainvoke("hello")
    with pytest.raises(UnknownDomainError, match="lwa"):
        list(model.stream("hello"))
    assert loads == []


def test_a_missing_file_is_named(loads: list[str]) -> None:
    with pytest.raises(OffsetFileError, match=r"gone\.safetensors"):
        ChatOffset(model="fake", domain="law", domains={"law": Path("gone.safetensors")}).invoke("hello")


def test_an_offset_of_another_base_is_refused(fake_runtime: OffsetRuntime, make_offset: Any, tmp_path: Path) -> None:
    other = fake_runtime.backend.identity.model_copy(update={"architecture": "llama"})
    file = make_offset(other, "law").save(tmp_path / "law.safetensors")

    with pytest.raises(BaseModelMismatchError, match="architecture llama"):
        ChatOffset(model="fake", domain="law", domains={"law": file}, runtime=fake_runtime).invoke("hello")


def test_a_model_is_not_offered_to_langchains_serialisation(fake_runtime: OffsetRuntime) -> None:
    model = ChatOffset(model="fake", runtime=fake_runtime)

    assert not model.is_lc_serializable()
    assert "runtime" not in model.model_dump()
    assert "OffsetRuntime" not in repr(model)


@pytest.mark.parametrize(
    ("name", "here"),
    [("num_predict", "max_tokens"), ("n_ctx", "llama_cpp="), ("repeat_penalty", "repetition_penalty")],
)
def test_a_name_of_other_chat_models_is_told_by_ours(name: str, here: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"no field '{name}'; here it is {here}"):
        ChatOffset(model="fake", **{name: 1})

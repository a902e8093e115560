"""Training an offset: what is learned, what is kept, what is refused."""

from __future__ import annotations

import inspect
import logging
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from offset_runtime.backends.torch import TorchBackend
from offset_runtime.documents import Document, Documents
from offset_runtime.errors import DocumentError, PlacementError, PromptFormatError
from offset_runtime.layout import lay_out
from offset_runtime.objective import Objective
from offset_runtime.retention import base_replies, instructions, measure_retention
from offset_runtime.scoring import target_logprobs
from offset_runtime.training import TrainingProgress, TrainingSettings, train

SENTENCE = "the court heard that clause four of the lease was void because notice had not been given in time"


def documents(count: int, words: int = 24, seed: int = 0) -> Documents:
    random = np.random.default_rng(seed)
    return Documents([Document(" ".join(random.choice(SENTENCE.split(), size=words))) for _ in range(count)])


def quick(**changes: Any) -> TrainingSettings:
    defaults = {"positions": 3, "max_tokens": 24, "steps": 6, "validate_every": 2, "batch_size": 4}
    return TrainingSettings(**{**defaults, "retention_weight": 0, **changes})


@pytest.fixture(autouse=True)
def few_instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models ramble to the last token, so three instructions a split are enough for them."""
    if "real_model" not in request.keywords:
        monkeypatch.setattr("offset_runtime.retention.instructions", lambda split: instructions(split)[:3])


@pytest.fixture(scope="module")
def tiny(make_model: Callable[..., Any], make_tokenizer: Callable[..., Any]) -> TorchBackend:
    # The tiny tokenizer spells most words out, so a chat takes more tokens than the tiny models' context.
    model = make_model("llama", max_position_embeddings=512)
    return TorchBackend(model, make_tokenizer(chat=True, bos=True))


@pytest.mark.parametrize(
    ("prompt_format", "anchor"), [("raw", "sequence"), ("bos", "sequence"), ("chat", "sequence"), ("chat", "turn")]
)
def test_training_lowers_held_out_loss_in_every_format(tiny: TorchBackend, prompt_format: Any, anchor: Any) -> None:
    settings = quick(prompt_format=prompt_format, anchor=anchor, steps=12, learning_rate=0.05)

    offset = train(tiny, documents(40), "legal", settings)

    assert offset.metrics["gain_percent"] > 0
    assert offset.metrics["documents"] == 6
    assert offset.metrics["retention"]["kl"] >= 0
    assert (offset.prompt_format, offset.anchor, offset.tensor.shape) == (prompt_format, anchor, (3, 32))
    assert offset.documents_digest == documents(40).digest()


def test_the_retention_term_lowers_the_divergence_from_the_base(tiny: TorchBackend) -> None:
    free = train(tiny, documents(20), "legal", quick(steps=8, learning_rate=0.05))
    held = train(tiny, documents(20), "legal", quick(steps=8, learning_rate=0.05, retention_weight=20))

    assert held.metrics["retention"]["kl"] < 0.7 * free.metrics["retention"]["kl"]


def test_weights_stay_frozen_and_no_state_is_left(tiny: TorchBackend) -> None:
    before = [p.clone() for p in tiny.model.parameters()]

    train(tiny, documents(12), "legal", quick())

    assert all(torch.equal(a, b) for a, b in zip(before, tiny.model.parameters(), strict=True))
    assert all(p.grad is None for p in tiny.model.parameters())
    assert tiny.state_bytes() == 0


def test_one_seed_gives_one_offset_and_another_seed_another(tiny: TorchBackend) -> None:
    first, again, other = (train(tiny, documents(12), "legal", quick(seed=seed)) for seed in (1, 1, 2))

    assert first.digest == again.digest
    assert first.digest != other.digest


def test_metrics_are_those_of_the_offset_that_was_kept(tiny: TorchBackend) -> None:
    held_back = documents(5, seed=9)
    offset = train(tiny, documents(12), "legal", quick(), validation=held_back)
    examples, _ = lay_out(held_back.items, tiny.tokenizer, "chat", max_tokens=24)

    logprobs = np.concatenate(target_logprobs(tiny, examples, offset))

    assert offset.metrics["perplexity_with"] == pytest.approx(float(np.exp(-logprobs.mean())), rel=1e-5)
    assert offset.metrics["retention"]["kl"] == pytest.approx(
        measure_retention(tiny, base_replies(tiny, "test"), offset).kl, rel=1e-4, abs=1e-7
    )


def test_training_stops_when_validation_no_longer_improves(tiny: TorchBackend) -> None:
    seen: list[TrainingProgress] = []
    # A rate this high only makes things worse after the first steps.
    settings = quick(steps=40, learning_rate=3.0, patience=2, validate_every=1)

    offset = train(tiny, documents(16), "legal", settings, progress=seen.append)

    assert len(seen) < 40
    assert offset.training["best_step"] == len(seen) - 2


def test_an_interrupt_keeps_the_best_so_far(tiny: TorchBackend, caplog: pytest.LogCaptureFixture) -> None:
    def interrupt(progress: TrainingProgress) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt

    with caplog.at_level(logging.WARNING):
        offset = train(tiny, documents(16), "legal", quick(steps=20), progress=interrupt)

    assert offset.training["best_step"] in (2, 4)
    assert "interrupted at step 5" in caplog.text
    assert tiny.state_bytes() == 0


def test_an_interrupt_before_the_first_look_keeps_what_was_learned(tiny: TorchBackend) -> None:
    def interrupt(progress: TrainingProgress) -> None:
        if progress.step == 3:
            raise KeyboardInterrupt

    offset = train(tiny, documents(16), "legal", quick(steps=20, validate_every=10), progress=interrupt)

    assert offset.training["best_step"] == 3
    assert np.abs(offset.tensor).max() > 0


def test_progress_reports_loss_gain_and_remaining_time(tiny: TorchBackend) -> None:
    seen: list[TrainingProgress] = []

    train(tiny, documents(16), "legal", quick(), progress=seen.append)

    assert [p.step for p in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[0].gain_percent is None
    assert seen[1].gain_percent is not None
    assert all(np.isfinite(p.loss) for p in seen)
    assert seen[-1].remaining_s == 0


def test_few_documents_are_all_trained_on_and_a_warning_says_so(
    tiny: TorchBackend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        offset = train(tiny, documents(4), "legal", quick())

    assert "only 4 documents" in caplog.text
    assert offset.training["documents"] == 4
    assert "gain_percent" not in offset.metrics
    assert "retention" in offset.metrics


def test_documents_without_enough_tokens_are_refused(tiny: TorchBackend) -> None:
    with pytest.raises(DocumentError, match="domain 'legal': none of 3 documents can be used"):
        train(tiny, Documents([Document(text) for text in "abc"]), "legal", quick())


def test_a_format_the_model_lacks_is_refused(make_model: Any, make_tokenizer: Any) -> None:
    bare = TorchBackend(make_model("llama"), make_tokenizer())

    with pytest.raises(PromptFormatError, match="needs a chat template"):
        # Twelve documents, so that the format is what fails.
        train(bare, documents(12), "legal", quick())
    with pytest.raises(PromptFormatError, match="start token"):
        train(bare, documents(12), "legal", quick(prompt_format="bos"))


def test_conversations_are_learned_at_every_assistant_turn(tiny: TorchBackend) -> None:
    turns = (("user", "what does the lease say"), ("assistant", "the clause four of the lease was void"))
    found = Documents([Document(f"conversation {i}", (*turns, *turns)) for i in range(12)])

    offset = train(tiny, found, "legal", quick())

    assert offset.training["documents"] == 10


def test_more_positions_than_a_prompt_has_tokens_are_refused_before_the_work(tiny: TorchBackend) -> None:
    with pytest.raises(PlacementError, match="domain 'legal' covers the last 250 prompt tokens"):
        train(tiny, documents(12), "legal", quick(positions=250), progress=lambda _: pytest.fail("training began"))


def test_a_turn_anchor_outside_chat_is_refused() -> None:
    with pytest.raises(ValidationError, match="has no turns"):
        TrainingSettings(prompt_format="raw", anchor="turn")


def test_prefixes_beyond_the_limit_are_not_kept_and_change_nothing(
    tiny: TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = train(tiny, documents(12), "legal", quick())
    monkeypatch.setattr("offset_runtime.objective.PREFIX_BYTES", 0)

    fed_again = train(tiny, documents(12), "legal", quick())

    np.testing.assert_allclose(fed_again.tensor, kept.tensor, atol=1e-4)


def test_a_kl_above_the_limit_is_said(tiny: TorchBackend, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(tiny, documents(12), "legal", quick(learning_rate=0.5, retention_weight=0.01, max_kl=0.001))

    assert "KL to the base is" in caplog.text


def test_recurrent_models_train(make_model: Any, make_tokenizer: Any) -> None:
    mamba = TorchBackend(make_model("mamba"), make_tokenizer(chat=True))

    offset = train(mamba, documents(20), "legal", quick(steps=10, learning_rate=0.05))

    assert offset.metrics["gain_percent"] > 0


def test_the_papers_recipe_has_three_epochs_and_no_retention_term() -> None:
    settings = TrainingSettings.paper(100)

    assert (settings.learning_rate, settings.steps, settings.retention_weight) == (1e-3, 300, 0)
    assert (settings.prompt_format, settings.effective_anchor) == ("raw", "sequence")


class TestObjective:
    @pytest.mark.parametrize("anchor", ["sequence", "turn"])
    def test_loss_equals_that_of_the_running_model(
        self, tiny: TorchBackend, anchor: Any, make_offset: Callable[..., Any]
    ) -> None:
        offset = make_offset(tiny.identity, anchor=anchor)
        examples, _ = lay_out(documents(6).items, tiny.tokenizer, "chat", max_tokens=24)
        objective = Objective(tiny, "legal", anchor, offset.positions)

        loss = objective.document_loss(objective.prepare(examples), torch.from_numpy(offset.tensor.copy()))

        objective.close()
        assert loss == pytest.approx(-np.concatenate(target_logprobs(tiny, examples, offset)).mean(), rel=1e-5)

    def test_gradient_equals_the_difference_quotient(self, tiny: TorchBackend) -> None:
        examples, _ = lay_out(documents(3).items, tiny.tokenizer, "chat", max_tokens=16)
        objective = Objective(tiny, "legal", "turn", 2)
        batch = objective.prepare(examples)
        delta = torch.full((2, 32), 0.1, requires_grad=True)
        objective.document_step(batch, delta)
        nudge = torch.zeros(2, 32)
        nudge[1, 5] = 1e-2

        plus, minus = (objective.document_loss(batch, (delta + s * nudge).detach()) for s in (1, -1))

        objective.close()
        assert delta.grad is not None
        assert delta.grad[1, 5].item() == pytest.approx((plus - minus) / 2e-2, rel=0.02, abs=1e-5)

    def test_a_batch_in_several_passes_has_the_gradient_of_one(
        self, tiny: TorchBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        examples, _ = lay_out(documents(6).items, tiny.tokenizer, "chat", max_tokens=16)
        gradients = []
        for tokens in (10_000, 30):
            monkeypatch.setattr("offset_runtime.objective.PASS_TOKENS", tokens)
            objective = Objective(tiny, "legal", "turn", 2)
            delta = torch.full((2, 32), 0.1, requires_grad=True)
            objective.document_step(objective.prepare(examples), delta)
            objective.close()
            gradients.append(delta.grad)

        assert torch.allclose(*gradients, atol=1e-6)

    def test_divergence_is_zero_without_an_offset(self, tiny: TorchBackend) -> None:
        objective = Objective(tiny, "legal", "turn", 2)
        replies = objective.prepare(base_replies(tiny, "validation"), keep_base=True)

        divergence = objective.divergence(replies, torch.zeros(2, 32))

        objective.close()
        assert divergence == pytest.approx(0, abs=1e-3)  # the base's log-probabilities are kept in float16


@pytest.mark.real_model
@pytest.mark.slow
def test_a_short_training_on_the_real_model_helps_unseen_text(smollm_torch: TorchBackend) -> None:
    modules = (inspect, textwrap, logging)
    sources = dict.fromkeys(
        inspect.getsource(f) for module in modules for _, f in inspect.getmembers(module, inspect.isfunction)
    )
    texts = [Document(source) for source in sources if len(source) > 200][:40]
    settings = TrainingSettings(positions=4, max_tokens=32, steps=8, validate_every=4, retention_weight=0)

    offset = train(smollm_torch, Documents(texts), "code", settings)

    assert offset.metrics["gain_percent"] > 5

"""If this fails, the wrong tokens are learned: a prompt is counted as an answer, padding as music, nothing as NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rung.nn.transformer import Transformer
from rung.random import Draw
from rung.recipes.piano.config import Model
from rung.recipes.piano.model import PianoLoss, build_model
from rung.recipes.piano.tokenizer import CLS, EOGENAI, GENAI, PAD, PLACE, VOCAB_SIZE

DRAW = Draw(0, 0, np.arange(2))


def model(context: int = 12) -> Transformer:
    return build_model(Model(n_layer=2, n_head=2, n_embd=16, context_size=context), seed=0)


def rows(*sequences: list[int]) -> dict[str, torch.Tensor]:
    width = max(map(len, sequences))
    return {"tokens": torch.tensor([row + [PAD] * (width - len(row)) for row in sequences])}


@given(st.lists(st.integers(2, PLACE - 1), max_size=6), st.lists(st.integers(2, PLACE - 1), max_size=6))
def test_the_first_counted_target_is_the_token_after_genai(prompt: list[int], answer: list[int]) -> None:
    row = [CLS, *prompt, GENAI, *answer, EOGENAI]
    tokens = torch.tensor([row + [PAD] * 3])
    counted = PianoLoss(model(), only_answers=True).weights(tokens)[0]
    targets = [int(y) for y, weight in zip(tokens[0, 1:], counted) if weight]
    assert targets == [*answer, EOGENAI]
    everything = PianoLoss(model()).weights(tokens)[0]
    assert [int(y) for y, weight in zip(tokens[0, 1:], everything) if weight] == row[1:]


def test_what_follows_the_end_of_an_answer_does_not_count() -> None:
    tokens = torch.tensor([[CLS, 5, GENAI, 6, EOGENAI, 7, 8]])
    assert PianoLoss(model(), only_answers=True).weights(tokens).tolist() == [[0, 0, 1, 1, 0, 0]]


@pytest.mark.parametrize("row", [[CLS, 5, 6, 7], [CLS, 5, 6, GENAI], [PAD, PAD, PAD, PAD]])
def test_a_row_without_an_answer_counts_nothing_and_moves_nothing(row: list[int]) -> None:
    net = model()
    loss = PianoLoss(net, only_answers=True)(rows(row), DRAW)
    assert loss.sum.item() == 0
    assert loss.count.item() == 0
    loss.sum.backward()
    assert all(p.grad is None or not p.grad.any() for p in net.parameters())


def test_the_prefix_is_not_predicted_nor_what_follows_it() -> None:
    tokens = torch.tensor([[PLACE + 4, PLACE + 14, 9, 10, 11]])
    assert PianoLoss(model(), num_given=2).weights(tokens).tolist() == [[0, 0, 1, 1]]


def test_position_0_gets_a_gradient() -> None:
    net = model()
    batch = rows([CLS, 5, 6, 7, 8])
    PianoLoss(net)(batch, DRAW).sum.backward()
    assert net.places is not None
    assert net.places.weight.grad is not None
    assert float(net.places.weight.grad[0].abs().max()) > 0


def test_nothing_is_learned_of_padding_as_an_input() -> None:
    """A row's padding comes after everything that counts, so that its embedding moves only as a wrong answer would."""
    net = model()
    targets = PianoLoss(net)(rows([CLS, 5, 6, 7, 8, 9], [CLS, 5]), DRAW).targets
    assert targets is not None
    losses, weights, _ = targets
    assert weights[1].tolist() == [1, 0, 0, 0, 0]
    assert losses[1, 1:].abs().max() == 0


def test_targets_are_never_changed() -> None:
    net, batch = model(), rows([CLS, 5, GENAI, 7, EOGENAI], [CLS, 9])
    before = batch["tokens"].clone()
    loss = PianoLoss(net, only_answers=True)
    first, second = loss(batch, DRAW), loss(batch, DRAW)
    assert torch.equal(batch["tokens"], before)
    assert torch.equal(first.sum, second.sum)


def test_classes_and_tasks_add_up_to_the_loss() -> None:
    net, names = model(), ["continuation", "infill"]
    batch = rows([CLS, 5, GENAI, 7, 100, 180, 210, EOGENAI], [CLS, 9, GENAI, 200, 190, EOGENAI])
    batch["task"] = torch.tensor([1, 0])
    for only_answers in (False, True):
        loss = PianoLoss(net, only_answers, tasks=names)(batch, DRAW)
        for some in (names, [name for name in loss.parts if name not in names]):
            assert sum(float(loss.parts[name][0].detach()) for name in some) == pytest.approx(float(loss.sum.detach()))
            assert sum(float(loss.parts[name][1]) for name in some) == float(loss.count)


def test_a_model_that_knows_nothing_loses_the_logarithm_of_the_vocabulary() -> None:
    net = model()
    with torch.no_grad():
        net.norm.weight.zero_()
    loss = PianoLoss(net)(rows([CLS, 5, 6, 7]), DRAW)
    assert (loss.sum / loss.count).item() == pytest.approx(np.log(VOCAB_SIZE), rel=1e-6)

"""If this fails, a look inside the model sees something else than there is, or training notices that it was taken."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rung.engine.activations import ActivationStats, ActivationSummary, attention, classes, few_rows
from rung.engine.guarded import ObjectiveState
from rung.engine.op_tracer import AttentionCall, LossCall
from rung.engine.precision import Precision
from rung.engine.prefetch import Micro
from rung.random import Draw
from rung.recipe import Batch, Loss
from tests.cases.tiny import LENGTH, VOCAB, Gpt, chain

CPU = torch.device("cpu")


def micro_of(batch: Batch) -> Micro:
    rows = np.arange(len(next(iter(batch.values()))))
    return Micro(rows, Draw(0, 3, rows), batch)


def look_at(
    model: nn.Module, batch: Batch, loss: object, dtype: str = "float32"
) -> tuple[ActivationStats, ActivationSummary]:
    trained = ObjectiveState("it", loss, list(model.parameters()), [])  # type: ignore[arg-type]
    look = ActivationStats(model, trained, Precision(dtype, CPU))
    return look, look.take(micro_of(batch), 3)


def gpt_loss(model: nn.Module) -> object:
    def loss(batch: Batch, draw: Draw) -> Loss:
        ids = batch["ids"]
        logits = model(ids[:, :-1])
        return Loss(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), torch.tensor(1.0))

    return loss


def gpt() -> Gpt:
    torch.manual_seed(0)
    return Gpt(32, 2, 0.1)


def column(looked: ActivationSummary, table: str, name: str) -> dict[str, float]:
    names, columns = looked.tables[table]
    return dict(zip(names, columns[name].tolist(), strict=True))


def squares(model: nn.Module) -> object:
    return lambda batch, draw: Loss(F.mse_loss(model(batch["x"]), batch["y"], reduction="sum"), torch.tensor(1.0))


@pytest.mark.parametrize("ruled_out", [-1e9, -math.inf])
def test_what_a_mask_rules_out_is_no_logit(ruled_out: float) -> None:
    model, ids = gpt(), torch.from_numpy(chain(16, 1))
    is_out = torch.arange(VOCAB) >= VOCAB - 3

    def loss(batch: Batch, draw: Draw) -> Loss:
        logits = model(batch["ids"][:, :-1]).masked_fill(is_out, ruled_out)
        targets = batch["ids"][:, 1:].clamp(max=VOCAB - 4)
        return Loss(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), torch.tensor(1.0))

    _, looked = look_at(model, {"ids": ids}, loss)
    with torch.no_grad():
        logits = model.eval()(ids[: math.ceil(512 / (LENGTH + 1)), :-1])[..., : VOCAB - 3]
    assert looked.scalars["logits/logit_mean"].item() == pytest.approx(logits.mean().item(), rel=1e-4, abs=1e-6)


def test_a_gpt_is_seen_whole() -> None:
    model, ids = gpt(), torch.from_numpy(chain(16, 1))
    look, looked = look_at(model, {"ids": ids}, gpt_loss(model))
    assert look.reason == ""
    few = ids[: math.ceil(512 / (LENGTH + 1))]
    with torch.no_grad():
        logits = model.eval()(few[:, :-1])
    said = {name: value.item() for name, value in looked.scalars.items()}
    assert said["logits/lse"] == pytest.approx(logits.logsumexp(-1).mean().item(), rel=1e-5)
    assert said["logits/logit_mean"] == pytest.approx(logits.mean().item(), rel=1e-4, abs=1e-6)
    assert said["logits/vocab"] == VOCAB
    spread = torch.distributions.Categorical(logits=logits)
    assert said["logits/entropy"] == pytest.approx(spread.entropy().mean().item(), rel=1e-5)
    assert said["logits/loss"] == pytest.approx(-spread.log_prob(few[:, 1:]).mean().item(), rel=1e-5)
    counts = torch.bincount(few[:, 1:].flatten(), minlength=VOCAB).double()
    assert said["logits/target_share"] == pytest.approx((counts.max() / counts.sum()).item(), rel=1e-5)
    assert said["logits/target_entropy"] == pytest.approx(
        torch.distributions.Categorical(counts).entropy().item(), rel=1e-5
    )
    said_most = torch.bincount(logits.argmax(-1).flatten(), minlength=VOCAB).max().item() / few[:, 1:].numel()
    assert said["logits/top1"] == pytest.approx(said_most, rel=1e-5)
    assert {"blocks.0", "blocks.1", "blocks.0.attention.qkv", "head"} <= set(column(looked, "modules", "rms"))
    assert math.isfinite(column(looked, "modules", "ratio")["blocks.1"])
    assert math.isnan(column(looked, "modules", "ratio")["head"])
    assert list(column(looked, "attention", "logit")) == ["blocks.0.attention", "blocks.1.attention"]
    assert list(column(looked, "units", "function").items()) == [("blocks.0.mlp.1", 0.0), ("blocks.1.mlp.1", 0.0)]


def test_training_does_not_notice() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 2)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1  # written in place, whatever the mode
            self.last = x.mean()  # written over
            return self.out(F.dropout(self.norm(x), 0.5, self.training))

    model = Counting()
    model.norm.eval()
    batch = {"x": torch.randn(8, 4), "y": torch.randn(8, 2)}
    squares(model)(batch, None).sum.backward()  # type: ignore[operator]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept, gradients = dict(model.named_buffers()), [p.grad.clone() for p in model.parameters() if p.grad is not None]
    look, looked = look_at(model, batch, squares(model))
    assert look.reason == ""
    assert looked.tables["modules"][0]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(buffer is kept[name] for name, buffer in model.named_buffers())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True) if p.grad is not None)
    assert (model.training, model.norm.training, model.out.training) == (True, False, True)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_batch_of_the_step_is_not_written_to() -> None:
    model = nn.Linear(3, 1)

    def loss(batch: Batch, draw: Draw) -> Loss:
        batch["x"].zero_()
        return Loss(model(batch["x"]).sum(), torch.tensor(1.0))

    x = torch.ones(4, 3)
    look, _ = look_at(model, {"x": x}, loss)
    assert look.reason == ""
    assert torch.equal(x, torch.ones(4, 3))


def test_a_loss_that_differentiates_inside_itself() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def penalty(batch: Batch, draw: Draw) -> Loss:
        x = batch["x"].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return Loss(slope.square().sum(), torch.tensor(1.0))

    look, looked = look_at(model, {"x": torch.randn(4, 3)}, penalty)
    assert look.reason == ""
    assert list(column(looked, "units", "slope")) == ["1"]
    assert not any(values.requires_grad for _, columns in looked.tables.values() for values in columns.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_cannot_be_looked_at_is_left_alone_for_good() -> None:
    calls = []

    def loss(batch: Batch, draw: Draw) -> Loss:
        calls.append(1)
        raise RuntimeError("needs the whole batch")

    model = nn.Linear(2, 2)
    look, looked = look_at(model, {"x": torch.zeros(2, 2)}, loss)
    assert (looked.scalars, looked.tables) == ({}, {})
    assert "needs the whole batch" in look.reason
    assert look.take(micro_of({"x": torch.zeros(2, 2)}), 103).tables == {}
    assert len(calls) == 2  # without a graph and with one, and never again
    assert model.training


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 70), numbers=st.integers(1, 2000))
def test_a_look_takes_the_first_rows_and_no_more_than_it_needs(num_rows: int, numbers: int) -> None:
    batch = {"x": torch.zeros(num_rows, numbers), "one": torch.zeros(num_rows), "shared": torch.zeros(num_rows + 1)}
    few = few_rows(micro_of(batch))
    taken = len(few.draw.rows)
    assert list(few.draw.rows) == list(range(taken))
    assert few.batch["x"].shape == (taken, numbers)
    assert few.batch["one"].shape == (taken,)
    assert few.batch["shared"].shape == (num_rows + 1,)
    assert 1 <= taken <= num_rows
    assert taken == num_rows or taken * numbers >= 512
    assert taken == 1 or (taken - 1) * numbers < 512


def plain_attention(seen: AttentionCall, heads: int) -> tuple[float, float]:
    """By hand, query by query: the largest logit and the mean of the normalised entropies."""
    assert seen.queries is not None
    assert seen.keys is not None
    largest, entropies = -math.inf, []
    for b in range(seen.queries.shape[0]):
        for h in range(heads):
            key_head = h * seen.keys.shape[1] // heads
            for t in range(seen.queries.shape[2]):
                scores = []
                for s in range(seen.keys.shape[2]):
                    score = float(seen.queries[b, h, t] @ seen.keys[b, key_head, s]) * seen.scale
                    if seen.is_causal and s > t:
                        continue
                    if seen.mask is not None:
                        m = seen.mask.expand(seen.queries.shape[0], heads, -1, -1)[b, h, t, s]
                        if (m.dtype == torch.bool and not m) or (m.dtype != torch.bool and m == -math.inf):
                            continue
                        score += 0.0 if m.dtype == torch.bool else float(m)
                    scores.append(score)
                largest = max(largest, *scores) if scores else largest
                if len(scores) > 1:
                    shares = np.exp(np.array(scores) - max(scores))
                    shares /= shares.sum()
                    entropies.append(-(shares * np.log(shares)).sum() / math.log(len(scores)))
    return largest, float(np.mean(entropies))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99), grouped=st.booleans(), causal=st.booleans(), kind=st.sampled_from(["", "bool", "float"])
)
def test_attention_is_what_one_computes_by_hand(seed: int, grouped: bool, causal: bool, kind: str) -> None:
    g = torch.Generator().manual_seed(seed)
    queries = torch.randn(2, 4, 5, 3, generator=g) * 2
    keys = torch.randn(2, 2 if grouped else 4, 5, 3, generator=g)
    is_seen = torch.rand(2, 1, 5, 5, generator=g) > 0.3
    mask = None
    if kind:
        mask = is_seen if kind == "bool" else torch.where(is_seen, torch.randn(2, 1, 5, 5, generator=g), -math.inf)
    seen = AttentionCall("a", queries, keys, 0.6, causal, mask)
    found = attention(seen)
    assert found is not None
    # Heads with no choice anywhere are left out of the mean; all heads share the mask here, so means are means.
    largest, entropy = plain_attention(seen, 4)
    assert found["logit"].item() == pytest.approx(largest, rel=1e-4)
    assert found["entropy"].item() == pytest.approx(entropy, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("function", ["sdpa", "softmax"])
def test_a_head_that_looks_at_one_key_has_collapsed(function: str) -> None:
    class Attend(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = torch.stack([x * 100, x * 0.01], 1)  # a head that chooses and one that does not
            k = x[:, None].expand_as(q)
            if function == "sdpa":
                return F.scaled_dot_product_attention(q, k, k, is_causal=True).sum(1)
            scores = q @ k.transpose(-1, -2) * 8**-0.5
            hidden = torch.ones(8, 8, dtype=torch.bool).triu(1)
            return (torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ k).sum(1)

    model = Attend()
    batch = {"x": torch.eye(8).expand(3, 8, 8).clone(), "y": torch.zeros(3, 8, 8)}
    _, looked = look_at(model, batch, squares(model))
    assert column(looked, "attention", "logit") == {"model": pytest.approx(100 * 8**-0.5)}
    assert column(looked, "attention", "collapsed") == {"model": 0.5}


def test_what_the_loss_ignores_is_ignored() -> None:
    logits = torch.randn(2, 7, 9)  # classes on the second axis
    targets = torch.randint(0, 7, (2, 9))
    targets[:, 4:] = -100
    found = classes(LossCall("", "cross_entropy", logits, targets, -100, None))
    expected = F.cross_entropy(logits, targets)
    assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert found["targets"].item() == 8
    share = found["target_share"].item()
    mixed = share * found["target_loss"].item() + (1 - share) * found["other_loss"].item()
    assert mixed == pytest.approx(expected.item(), rel=1e-5)


def test_units_die_when_they_were_silent_in_every_remembered_look() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0], [0.0], [0.0]]))
        model[0].bias.copy_(torch.tensor([0.0, 0.0, 1.0, -1.0]))
    trained = ObjectiveState("it", squares(model), list(model.parameters()), [])  # type: ignore[arg-type]
    look = ActivationStats(model, trained, Precision("float32", CPU))
    positive, negative = ({"x": torch.full((4, 1), sign), "y": torch.zeros(4, 1)} for sign in (1.0, -1.0))
    seen = [look.take(micro_of(positive), step) for step in range(3)]
    assert [column(looked, "units", "dead")["1"] for looked in seen] == [0.5] * 3  # the second and the last
    looked = look.take(micro_of(negative), 3)
    assert (column(looked, "units", "dead")["1"], column(looked, "units", "looks")["1"]) == (0.25, 4)
    assert column(looked, "units", "silent")["1"] == 0.5
    for step in range(50):  # the first speaks no more, and 50 looks later nobody remembers that it did
        looked = look.take(micro_of(negative), 4 + step)
    assert (column(looked, "units", "dead")["1"], column(looked, "units", "looks")["1"]) == (0.5, 50)


@pytest.mark.parametrize("squash", [F.relu, torch.tanh, torch.sigmoid])
def test_one_number_a_row_and_one_in_all_can_be_looked_at(squash: object) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            score: Tensor = squash(self.out(x)[:, 0])  # type: ignore[operator]
            return score + squash(score.mean())  # type: ignore[operator]

    model = Scores()
    with torch.no_grad():
        model.out.bias.fill_(100.0)
    look, looked = look_at(model, {"x": torch.randn(4, 3), "y": torch.randn(4)}, squares(model))
    assert look.reason == ""
    silent = column(looked, "units", "silent")
    assert list(silent) == ["model", "model#2"]
    assert squash is not F.relu or list(silent.values()) == [0, 0]


def test_a_margin_that_is_kept_is_no_dead_unit() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

    def hinge(batch: Batch, draw: Draw) -> Loss:
        return Loss(F.relu(model(batch["x"]) - 1e6).sum(), torch.tensor(1.0))

    look, looked = look_at(model, {"x": torch.randn(4, 3)}, hinge)
    assert look.reason == ""
    assert list(column(looked, "units", "silent")) == ["1"]


def test_targets_beyond_a_squash_of_the_loss_are_seen() -> None:
    model = nn.Linear(3, 1)

    def squashed(batch: Batch, draw: Draw) -> Loss:
        return Loss(F.mse_loss(torch.sigmoid(model(batch["x"])), batch["y"], reduction="sum"), torch.tensor(1.0))

    _, looked = look_at(model, {"x": torch.randn(4, 3), "y": torch.tensor([[0.5], [2.0], [0.1], [-1.0]])}, squashed)
    assert looked.scalars["logits/outside"].item() == 0.5
    assert "units" not in looked.tables


def test_the_channels_of_a_convolution_are_its_units() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU(), nn.Conv1d(3, 2, 1))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([100.0, -100.0, -100.0]))
    _, looked = look_at(model, {"x": torch.randn(4, 2, 5), "y": torch.zeros(4, 2, 5)}, squares(model))
    assert column(looked, "units", "silent")["1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(("squash", "kind", "slope"), [(nn.Tanh(), 1, 0.0), (nn.Sigmoid(), 2, 0.0)])
def test_saturation_is_seen_inside_but_not_asked_of_outputs(squash: nn.Module, kind: int, slope: float) -> None:
    model = nn.Sequential(nn.Linear(3, 5), squash, nn.Linear(5, 2), nn.Tanh())
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    targets = torch.tensor([[0.5, 2.0]] * 4)
    _, looked = look_at(model, {"x": torch.randn(4, 3), "y": targets}, squares(model))
    assert column(looked, "units", "function") == {"1": kind}
    assert column(looked, "units", "saturated")["1"] == pytest.approx(1.0)
    assert column(looked, "units", "slope")["1"] == pytest.approx(slope, abs=1e-3)
    assert looked.scalars["logits/outside"].item() == 0.5


def test_half_precision_and_a_module_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    model = Twice()
    look, looked = look_at(model, {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}, squares(model), "bfloat16")
    assert look.reason == ""
    assert list(column(looked, "units", "silent")) == ["inner.1", "inner.1#2"]
    assert {"inner", "inner#2"} <= set(column(looked, "modules", "peak"))


@pytest.mark.parametrize("num_codebooks", [2, 3, 4, 8, 9, 12])
def test_every_codebook_is_looked_at(num_codebooks: int) -> None:
    """Targets come flat, codebooks last: a stride that divides them would see one of them alone."""
    model = nn.Linear(1, 8)
    sizes = torch.linspace(0, 9, num_codebooks)  # from evenly spread to certain

    def loss(batch: Batch, draw: Draw) -> Loss:
        logits = batch["x"].new_zeros(1, 508, num_codebooks, 8)
        logits[..., 0] = sizes
        each = F.cross_entropy(logits.flatten(0, -2), torch.zeros(508 * num_codebooks, dtype=torch.long))
        return Loss(each, torch.tensor(1.0))

    _, looked = look_at(model, {"x": torch.zeros(1, 508 * num_codebooks)}, loss)
    one_of_each = F.one_hot(torch.tensor(0), 8) * sizes[:, None]
    expected = torch.distributions.Categorical(logits=one_of_each).entropy().mean().item()
    assert looked.scalars["logits/entropy"].item() == pytest.approx(expected, rel=0.05)

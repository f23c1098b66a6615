"""If this fails, pre-flight misses a mistake in a model or its loss, accuses a sound one, or changes the run."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rung.cli.check import command
from rung.doctor.preflight import batches as in_batches
from rung.doctor.preflight import causality, checks, cut, numerics, objective, pure, scale, trained
from rung.doctor.preflight.checks import quick, run_checks
from rung.doctor.preflight.result import Check, CheckContext, NotApplicable, Result, render
from rung.engine.build import Setup
from rung.engine.op_tracer import BoundsCheck, OpTracer, OutOfRange
from rung.engine.state import set_training
from rung.random import Draw
from rung.recipe import Batch, Loss, Objective, Recipe, Sample, Stream
from tests.cases.preflight_cases import Drops, HalfTable, KeepsStatistics, Masked, NoShift, Scaled, losses_of
from tests.cases.preflight_cases import objective as one_objective
from tests.cases.running import run_case, setup_of
from tests.cases.tiny import LENGTH, VOCAB, Gpt, Rows, Tiny, chain
from tests.contract.cases import CASES as CONTRACT

Look = Callable[[CheckContext], Any]


def ask(look: Look, recipe: type[Recipe] = Tiny, *overrides: str) -> list[Result]:
    return list(look(CheckContext(setup_of(recipe, *overrides))))


def one(look: Look, recipe: type[Recipe] = Tiny, *overrides: str) -> Result:
    found = ask(look, recipe, *overrides)
    assert len(found) == 1, found
    return found[0]


def everything(setup: Setup) -> Any:
    """All that a check must leave alone, to the bit."""
    model = setup.state.model
    tensors = {n: t.detach().numpy().tobytes() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    optimizers = [repr(o.state_dict()) for trained in setup.state.objectives for o in trained.optimizers]
    modes, gradients = [module.training for module in model.modules()], [p.grad for p in model.parameters()]
    seeds = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())
    return tensors, optimizers, modes, gradients, seeds, sorted(setup.config.reads)


@pytest.mark.parametrize("recipe", [Tiny, KeepsStatistics, Drops, HalfTable, Masked])
def test_the_quick_form_leaves_no_trace(recipe: type[Tiny]) -> None:
    setup = setup_of(recipe)
    set_training(setup.state.model)
    before = everything(setup)
    quick(setup)
    assert everything(setup) == before


@pytest.mark.parametrize("name", list(CONTRACT))
def test_recipes_that_are_sound_pass(name: str, request: pytest.FixtureRequest) -> None:
    make, data = CONTRACT[name]
    setup = make(request.getfixturevalue(data)).setup("system.data_workers=0")
    set_training(setup.state.model)
    before = everything(setup)
    results = quick(setup)
    others = ("R2", "E7")  # whether code is committed; and the toy's film does repeat itself in its eval set
    assert [r for r in results if r.level in ("warn", "fail") and r.rule not in others] == []
    assert everything(setup) == before


def test_a_check_that_raises_is_a_warning_and_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: CheckContext) -> list[Result]:
        raise ValueError("first line\nsecond line")

    def fine(context: CheckContext) -> list[Result]:
        return [Result("pass", "")]

    monkeypatch.setattr(checks, "all_checks", lambda: [Check("broken", "", broken), Check("fine", "", fine)])
    first, second = run_checks(CheckContext(setup_of(Tiny)))
    assert first.level == "warn"
    assert "first line" in first.seen
    assert "second" not in first.seen
    assert second.level == "pass"


def test_what_changes_state_comes_last_and_not_in_the_quick_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def fine(context: CheckContext) -> list[Result]:
        return [Result("pass", "")]

    b, a, c = Check("b", "", fine, changes_state=True), Check("a", "", fine), Check("c", "", fine, is_quick=False)
    monkeypatch.setattr(checks, "FILES", [SimpleNamespace(b=b, a=a, c=c)])
    setup = setup_of(Tiny)
    assert [r.name for r in run_checks(CheckContext(setup))] == ["a", "c", "b"]
    assert [r.name for r in quick(setup)] == ["a"]


# Optimizers


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.sampled_from([1e-8, 1e-6, 1e-4]),
    st.sampled_from(["fused", "foreach", "single"]),
)
def test_the_dry_run_foresees_what_the_update_does(dtype: torch.dtype, eps: float, kind: str) -> None:
    def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, eps=eps, fused=kind == "fused", foreach=kind == "foreach")

    really = []
    for gradient in (0.0, 1e-4):
        weight = nn.Parameter(torch.full((3, 5), 0.1, dtype=dtype))
        weight.grad = torch.full_like(weight, gradient)
        adamw([weight]).step()
        really.append(bool(torch.isfinite(weight).all()))
    setup = setup_of(Tiny)
    setup.state.objectives[0].optimizers = [adamw([nn.Parameter(torch.full((64, 16), 0.1, dtype=dtype))])]
    (result,) = numerics.dry_run(CheckContext(setup))
    assert (result.level == "pass") == all(really)


def test_optimizers_with_constructors_of_their_own_can_be_tried() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any, temper: float) -> None:
            super().__init__(parameters, {"lr": 0.0})
            self.temper = temper

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.data -= self.param_groups[0]["lr"] * parameter.grad / self.temper

    for temper, level in ((1.0, "pass"), (0.0, "fail")):
        setup = setup_of(Tiny)
        setup.state.objectives[0].optimizers = [Own(setup.state.objectives[0].parameters, temper)]
        before = everything(setup)
        assert next(iter(numerics.dry_run(CheckContext(setup)))).level == level
        assert everything(setup) == before


def test_half_weights_are_fine_where_they_are_frozen() -> None:
    class Frozen(Tiny):
        def model(self) -> nn.Module:
            model = super().model()
            assert isinstance(model, Gpt)
            model.tokens.half().requires_grad_(False)
            return model

    assert one(numerics.dtypes, Frozen).level == "pass"
    assert one(numerics.dtypes, HalfTable).level == "warn"


# Ids and targets


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 63), st.integers(0, LENGTH), st.sampled_from([-1, VOCAB, VOCAB + 1000]))
def test_an_id_out_of_range_is_named_with_its_row_and_position(row: int, position: int, value: int) -> None:
    class Bad(Tiny):
        def streams(self) -> Mapping[str, Stream]:
            ids = chain(64, 1)
            ids[row, position] = value
            return {"train": Rows("bad", ids=ids), "val": Rows("val", ids=chain(8, 2))}

    result = one(in_batches.ids_in_range, Bad)
    assert (result.level, result.rule) == ("fail", "D3")
    assert f"row {row} of train" in result.seen
    assert f" {value} " in result.seen
    place = position if position < LENGTH else LENGTH - 1  # the last id is only a label
    assert f"position {place}:" in result.seen


class Padded(Tiny):
    """Ids travel as uint16; rows end in an id that no table knows, which is cut off inputs and masked as a label."""

    pad = 40_000

    def streams(self) -> Mapping[str, Stream]:
        ids = chain(200, 1).astype(np.uint16)
        ids[:, 20:] = np.where(np.arange(200)[:, None] % 3 == 0, self.pad, ids[:, 20:])
        return {"train": Rows("padded", ids=ids), "val": Rows("val", ids=ids[:9])}

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"].long()
            targets = ids[:, 1:].masked_fill(ids[:, 1:] == self.pad, -100)
            logits = model(ids[:, :-1].masked_fill(ids[:, :-1] == self.pad, 0))
            total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            return Loss(total, (targets != -100).sum().float())

        return one_objective(model, loss)


def test_padding_that_no_table_sees_is_no_error() -> None:
    assert one(in_batches.ids_in_range, Padded).level == "pass"
    found = objective.same_objective(CheckContext(setup_of(Padded)))
    (result,) = found
    assert result.level == "pass"


def test_a_dtype_too_narrow_for_its_table_is_told() -> None:
    class Narrow(Tiny):
        def streams(self) -> Mapping[str, Stream]:
            ids = chain(64, 1).astype(np.uint8)
            return {"train": Rows("narrow", ids=ids), "val": Rows("val", ids=ids[:8])}

        def model(self) -> nn.Module:
            model = super().model()
            assert isinstance(model, Gpt)
            model.tokens = nn.Embedding(300, self.cfg.model.width)
            return model

        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            inner = super().objectives(model)[0]
            return [inner._replace(loss=lambda batch, draw: inner.loss({"ids": batch["ids"].long()}, draw))]

    levels = {r.name: r.level for r in ask(in_batches.ids_in_range, Narrow)}
    assert levels == {"ids in range": "pass", "width of ids": "warn"}


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


@pytest.mark.parametrize("make", [Indexed, lambda: nn.Embedding(4, 2)], ids=["brackets", "embedding"])
def test_the_wary_lens_speaks_before_the_call(make: Callable[[], nn.Module]) -> None:
    model = make()
    with OpTracer(model) as tracer:
        model(torch.tensor([[0, 3]]))
    assert tracer.lookups[0].num_rows == 4
    with pytest.raises(OutOfRange) as caught, BoundsCheck(model):
        model(torch.tensor([[0, 3], [4, 1]]))
    assert (caught.value.value, caught.value.limit, caught.value.place) == (4, 4, 2)
    model(torch.tensor([[0, 3]]))  # and nothing is left of it


def test_an_error_of_the_loss_is_told_once() -> None:
    class Wrong(Tiny):
        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            def loss(batch: Batch, draw: Draw) -> Loss:
                raise RuntimeError("shapes do not fit")

            return one_objective(model, loss)

    results = quick(setup_of(Wrong))
    assert [r.name for r in results if r.level == "fail"] == ["first forward"]
    assert "shapes do not fit" in next(r.seen for r in results if r.level == "fail")


# Loss and evals


class Drawn(Tiny):
    """A masked model: which positions are targets is drawn at every step."""

    is_causal = False
    share = 0.3

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            losses, targets = losses_of(model, batch["ids"])
            share = self.share if draw.is_eval else 0.3
            counts = (draw.noise(self.stream_of(draw), (targets.shape[1],)) < share).float()
            return Loss((losses * counts).sum(), counts.sum())

        return one_objective(model, loss)

    def stream_of(self, draw: Draw) -> str:
        return "mask"


class DrawnApart(Drawn):
    def stream_of(self, draw: Draw) -> str:
        return "mask of evals" if draw.is_eval else "mask"


class DrawnMore(DrawnApart):
    share = 0.5


def test_targets_that_are_drawn_are_compared_with_the_same_numbers() -> None:
    assert one(objective.same_objective, Drawn).level == "pass"
    assert one(objective.same_objective, DrawnMore).level == "warn"
    with pytest.raises(NotApplicable, match="drawn"):
        one(objective.same_objective, DrawnApart)
    with pytest.raises(NotApplicable, match="not causal"):
        one(causality.causality, Drawn)


class TextDropout(Tiny):
    """Ids are dropped at random in training, as the inputs of some speech models are."""

    is_sick = False

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"]
            entered = ids[:, :-1]
            if not draw.is_eval:
                entered = self.drop(entered, draw)
            smoothing = 0.2 if self.is_sick and self.is_training(model, draw) else 0.0
            logits = 9 * model(entered).flatten(0, 1)
            total = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum", label_smoothing=smoothing)
            return Loss(total, torch.tensor(float(ids[:, 1:].numel())))

        return one_objective(model, loss)

    def drop(self, ids: Tensor, draw: Draw) -> Tensor:
        return torch.where(draw.noise("drop", tuple(ids.shape[1:])) < 0.2, 0, ids)

    def is_training(self, model: nn.Module, draw: Draw) -> bool:
        return not draw.is_eval


class TorchDropout(TextDropout):
    def drop(self, ids: Tensor, draw: Draw) -> Tensor:
        return torch.where(torch.rand(ids.shape) < 0.2, 0, ids)


class Turned(TextDropout):
    """Nothing stills a permutation of ids that begins with another one."""

    def drop(self, ids: Tensor, draw: Draw) -> Tensor:
        return (ids + 1 + torch.from_numpy(draw.integers("turn", VOCAB - 1))[:, None]) % VOCAB


class ByMode(TextDropout):
    def is_training(self, model: nn.Module, draw: Draw) -> bool:
        return model.training


@pytest.mark.parametrize("recipe", [TextDropout, TorchDropout, Turned, ByMode])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_noise_of_training_hides_no_other_loss(recipe: type[TextDropout], dropout: float) -> None:
    sick = type("Sick", (recipe,), {"is_sick": True})
    key = f"model.dropout={dropout}"
    assert {r.level for r in ask(objective.same_objective, recipe, key)} <= {"pass", "skip"}
    assert "warn" in {r.level for r in ask(objective.same_objective, sick, key)}


def test_batch_statistics_are_no_other_loss() -> None:
    assert {r.level for r in ask(objective.same_objective, KeepsStatistics)} == {"pass"}

    class Batched(Tiny):
        def model(self) -> nn.Module:
            model = super().model()
            assert isinstance(model, Gpt)
            model.norm = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(32), nn.Unflatten(0, (-1, LENGTH)))  # type: ignore[assignment]
            return model

    assert {r.level for r in ask(objective.same_objective, Batched)} == {"pass"}


class Extra(Tiny):
    """Training adds a term, and says so or not."""

    is_declared, is_noisy, times = True, False, 0.5

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            losses, targets = losses_of(model, batch["ids"])
            total, count = losses.sum(), torch.tensor(float(targets.numel()))
            parts = {"own": (total, count)}
            if draw.is_eval:
                return Loss(total, count, parts)
            more = self.times * total.detach() + (10 * (draw.noise("more", (1,)) - 0.5).sum() if self.is_noisy else 0.0)
            return Loss(total + more, count, parts | ({"more": (more, count)} if self.is_declared else {}))

        return one_objective(model, loss)


class Undeclared(Extra):
    is_declared = False


class Noisy(Extra):
    """The noise of the term hides that its mean is not nought."""

    is_declared, is_noisy = False, True


class Zero(Noisy):
    times = 0.0


@pytest.mark.parametrize(("recipe", "level"), [(Extra, "pass"), (Undeclared, "warn"), (Noisy, "warn"), (Zero, "pass")])
def test_a_term_that_only_training_has_must_be_declared(recipe: type[Tiny], level: str) -> None:
    assert one(objective.same_objective, recipe).level == level


def test_a_mask_that_hides_behind_the_mode_is_seen() -> None:
    class Hidden(Tiny):
        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            def loss(batch: Batch, draw: Draw) -> Loss:
                losses, targets = losses_of(model, batch["ids"])
                counts = (targets >= 4).float() if model.training else torch.ones_like(losses)
                return Loss((losses * counts).sum(), counts.sum())

            return one_objective(model, loss)

    assert one(objective.same_objective, Hidden).level == "fail"


def test_the_listing_marks_what_counts() -> None:
    context = CheckContext(setup_of(Masked))
    (result,) = objective.same_objective(context)
    mask, ids = context.micro.batch["mask"][0].tolist(), context.micro.batch["ids"][0].tolist()
    lines = [line.split() for line in result.detail.splitlines()[2:]]
    assert len(lines) == LENGTH
    for at, parts in enumerate(lines):
        assert parts[:3] == [str(at), str(ids[at]), str(ids[at + 1])]
        assert parts[3:] == (["counted"] if mask[at] else ["not", "counted"])


def test_a_long_listing_says_of_every_position_whether_it_counts() -> None:
    marks = [at % 100 != 57 for at in range(500)]
    lines = objective.listing_lines([None] * 500, list(range(500)), marks)
    listed: dict[int, bool] = {}
    for parts in map(str.split, lines):
        is_range = parts[1] == "to"
        first, last = int(parts[0]), int(parts[2] if is_range else parts[0])
        listed |= dict.fromkeys(range(first, last + 1), "not" not in parts)
    assert listed == dict(enumerate(marks))
    assert len(lines) < 100


def test_dropout_inside_attention_counts_as_dropout() -> None:
    q = torch.randn(1, 2, 4, 8)
    model = nn.Identity()
    with OpTracer(model) as tracer:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
        F.scaled_dot_product_attention(q, q, q)
        F.dropout(q, 0.3, training=False)
        nn.Dropout(0.4).eval()(q)
        nn.Dropout(0.5)(q)
    assert [dropped.share for dropped in tracer.dropout_calls] == [0.2, 0.5]


def test_positions_that_do_not_see_each_other_yet_prove_nothing() -> None:
    class Silent(Tiny):
        def model(self) -> nn.Module:
            model = super().model()
            for name, parameter in model.named_parameters():
                if "attention.out" in name:
                    nn.init.zeros_(parameter)
            return model

    with pytest.raises(NotApplicable, match="no position sees"):
        one(causality.causality, Silent)


def test_a_leak_through_the_loss_is_seen_too() -> None:
    """The model is causal, but the loss lets it read the targets."""

    class Reads(Tiny):
        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            assert isinstance(model, Gpt)

            def loss(batch: Batch, draw: Draw) -> Loss:
                ids = batch["ids"]
                logits = model(ids[:, :-1]) + model.head(model.tokens(ids[:, 1:]))
                total = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
                return Loss(total, torch.tensor(float(ids[:, 1:].numel())))

            return one_objective(model, loss)

    assert one(causality.causality, Reads).level == "fail"
    assert "shift" in one(causality.causality, NoShift).remedy


def test_rows_that_judge_each_other_are_a_warning_and_noise_of_torch_is_no_question() -> None:
    class Contrast(Tiny):
        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            def loss(batch: Batch, draw: Draw) -> Loss:
                means = F.normalize(model(batch["ids"][:, :-1]).mean(1), dim=1)
                total = F.cross_entropy(9 * means @ means.T, torch.arange(len(means)), reduction="sum")
                return Loss(total, torch.tensor(float(len(means))))

            return one_objective(model, loss)

    class Random(Tiny):
        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            inner = super().objectives(model)[0]

            def loss(batch: Batch, draw: Draw) -> Loss:
                found = inner.loss(batch, draw)
                return found._replace(sum=found.sum * torch.rand(()))

            return one_objective(model, loss)

    assert one(cut.cut, Contrast).level == "warn"
    with pytest.raises(NotApplicable, match="of torch"):
        one(cut.cut, Random)


def test_a_head_that_knows_the_frequencies_is_no_fault() -> None:
    class Knows(Tiny):
        def streams(self) -> Mapping[str, Stream]:
            ids = np.where(np.random.default_rng(0).random((64, LENGTH + 1)) < 0.95, 3, 5)
            return {"train": Rows("knows", ids=ids), "val": Rows("val", ids=ids[:8])}

        def model(self) -> nn.Module:
            model = super().model()
            assert isinstance(model, Gpt)
            model.head = nn.Linear(self.cfg.model.width, VOCAB)
            with torch.no_grad():
                model.head.bias[3] += 6
            return model

    assert one(scale.initial_loss, Knows).level == "pass"


class Binary(Tiny):
    """Two classes, one target a row, a layer as torch makes it but for its scale."""

    gain = 1.0

    def streams(self) -> Mapping[str, Stream]:
        x = np.random.default_rng(self.seed).standard_normal((64, 8)).astype(np.float32)
        return {name: Rows(name, 1.0, x=x, y=(x[:, 0] > 0).astype(np.int64)) for name in ("train", "val")}

    def model(self) -> nn.Module:
        model = nn.Linear(8, 2)
        with torch.no_grad():
            model.weight.mul_(self.gain)
        return model

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            total = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
            return Loss(total, torch.tensor(float(len(batch["y"]))))

        return one_objective(model, loss)


class BinaryLoud(Binary):
    gain = 100.0


def test_four_rows_above_a_guess_by_chance_are_no_loud_head() -> None:
    losses = []
    for seed in range(12):
        result = one(scale.initial_loss, Binary, f"seed={seed}")
        assert result.level == "pass", result
        losses.append(float(result.seen.split()[0]))
    assert max(losses) > 1.3 * np.log(2)  # by chance: this is what the limit must allow
    assert any(one(scale.initial_loss, BinaryLoud, f"seed={seed}").level == "warn" for seed in range(3))


def test_numbers_that_are_not_finite_are_named() -> None:
    class Root(Tiny):
        """Finite forwards, and a gradient that is not."""

        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            inner = super().objectives(model)[0]
            assert isinstance(model, Gpt)

            def loss(batch: Batch, draw: Draw) -> Loss:
                found = inner.loss(batch, draw)
                zero = (model.head.weight * 0).sum()
                return found._replace(sum=found.sum + torch.where(zero > 0, zero.sqrt(), zero))

            return one_objective(model, loss)

    class Nan(Tiny):
        def model(self) -> nn.Module:
            model = super().model()
            assert isinstance(model, Gpt)
            model.places.weight.data[0, 0] = torch.nan
            return model

    assert (result := one(scale.finite, Root)).level == "fail"
    assert "head.weight" in result.seen
    assert "places.weight" in one(numerics.finite_weights, Nan).seen
    assert [r.name for r in quick(setup_of(Nan)) if r.level == "fail"] == ["finite weights"]


# What people see


def test_the_table_shows_every_result_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    results = [
        Result("pass", "1", name="a"),
        Result("fail", "word " * 60, "fix it", name="long name", rule="D3"),
        Result("skip", "2", name="c"),
    ]
    text = render(results, 1.26)
    assert max(map(len, text.splitlines())) <= 80
    assert "try: fix it" in text
    assert text.splitlines()[-1] == "3 results in 1.3 s: 1 fail, 1 skip, 1 pass"


WORDS = ("system.device=cpu", "data.batch_size=16", "num_rows=200", "optimizer.max_iters=20", "lr.warmup_iters=2")


def test_the_verb_checks_recipes_and_says_by_its_exit_code_what_it_found(tmp_path: Path) -> None:
    def check(recipe: str, *more: str) -> Any:
        return CliRunner().invoke(command, [recipe, *WORDS, "--runs", str(tmp_path), "--quick", *more])

    fine = check("tests.cases.tiny:Tiny", "--json")
    assert fine.exit_code == 0, fine.output
    assert {r["level"] for r in json.loads(fine.output)["results"]} <= {"pass", "skip", "warn"}
    sick = check("tests.cases.preflight_cases:NoShift")
    assert sick.exit_code == 1
    assert "no look ahead" in sick.output
    assert list(tmp_path.iterdir()) == []


def test_the_verb_checks_a_run_at_its_last_save(tmp_path: Path) -> None:
    run = run_case(Tiny, tmp_path, "optimizer.max_iters=30", "num_rows=200")
    done = CliRunner().invoke(command, [str(run.path), "--runs", str(tmp_path), "--quick"])
    assert done.exit_code == 0, done.output
    assert "the weights are trained" in done.output


# What will not be trained, and what is changed by looking


class Forgets(Tiny):
    """The head is in no objective."""

    freezes = False

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        assert isinstance(model, Gpt)
        if self.freezes:
            model.head.requires_grad_(False)
        inner = super().objectives(model)[0]
        return one_objective(nn.ModuleList([model.tokens, model.places, model.blocks, model.norm]), inner.loss)


class Freezes(Forgets):
    freezes = True


class Unregistered(Tiny):
    """A layer in a Python list."""

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        layers = [nn.Linear(VOCAB, VOCAB)]

        def loss(batch: Batch, draw: Draw) -> Loss:
            ids = batch["ids"]
            logits = layers[0](model(ids[:, :-1])).flatten(0, 1)
            return Loss(
                F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum"), torch.tensor(ids[:, 1:].numel())
            )

        return one_objective(model, loss)


def test_parameters_that_nobody_trains_are_named() -> None:
    result = one(trained.trained_parameters, Forgets)
    assert result.level == "warn"
    assert "head.weight" in result.seen
    assert one(trained.trained_parameters, Freezes).level == "pass"
    result = one(trained.trained_parameters, Unregistered)
    assert (result.level, "32x32" in result.seen) == ("warn", True)


class PaddedIds(Tiny):
    """`padding_idx` is an id of the data; the healthy twin has it at the end of rows alone."""

    is_sick = True

    def streams(self) -> Mapping[str, Stream]:
        ids = chain(200, 1)
        if not self.is_sick:
            ids[ids == 3] = 4
            ids[:, 25:] = 3
        return {"train": Rows("padded", ids=ids), "val": Rows("val", ids=ids[:9])}

    def model(self) -> nn.Module:
        model = super().model()
        assert isinstance(model, Gpt)
        model.tokens.padding_idx = 3
        return model


class PaddedTwin(PaddedIds):
    is_sick = False


def test_a_row_that_is_used_and_never_changes_is_named() -> None:
    result = one(trained.trained_rows, PaddedIds)
    assert result.level == "warn"
    assert "id 3 of tokens.weight" in result.seen
    assert one(trained.trained_rows, PaddedTwin).level == "pass"
    assert one(trained.trained_rows).level == "pass"


class SharpQueries(Scaled):
    factors = {"qkv": 15.0}


def test_attention_that_has_chosen_at_the_start_is_told() -> None:
    for recipe, level in ((SharpQueries, "warn"), (Tiny, "pass")):
        result = one(scale.attention, recipe)
        assert result.level == level, result
    logit = max(scale.table(CheckContext(setup_of(SharpQueries)), "attention", "logit").values())
    assert 12 < logit < 50


class Casts(Tiny):
    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        model.bfloat16().float()
        return [Sample("a.txt", b"a")]


class Measures(Tiny):
    def measure(self, model: nn.Module, batch: Batch, draw: Draw) -> dict[str, Any]:
        assert isinstance(model, Gpt)
        model.head.weight.data.mul_(1.01)
        return {}


@pytest.mark.parametrize(("recipe", "what"), [(Casts, "a sample"), (Measures, "an eval")])
def test_an_eval_or_a_sample_that_changes_weights_is_named_and_undone(recipe: type[Tiny], what: str) -> None:
    setup = setup_of(recipe)
    before = everything(setup)
    with checks.untouched(setup):
        result, *_ = pure.evals_and_samples(CheckContext(setup))
    assert (result.level, result.seen.startswith(what)) == ("warn", True)
    assert everything(setup) == before
    assert one(pure.evals_and_samples).level == "pass"


def test_what_the_engine_changes_is_said() -> None:
    class Half(Tiny):
        def model(self) -> nn.Module:
            model = super().model().bfloat16()
            assert isinstance(model, Gpt)
            model.places.requires_grad_(False)
            return model

        def objectives(self, model: nn.Module) -> Sequence[Objective]:
            model.places.float()  # type: ignore[union-attr]
            return super().objectives(model)

    setup = setup_of(Half)
    changed = setup.derived["changed"]
    assert "head.weight" in changed["to float32"]["bfloat16"]
    assert changed["eval mode"] == ["places"]
    assert sum("float32 now" in line or "eval mode" in line for line in setup.chosen) == 2
    assert setup_of(Tiny).derived["changed"] == {"to float32": {}, "eval mode": []}

"""If this fails, a guarded loop of somebody's own learns other weights than without the guard, or a bad step of it
leaves its mark, goes unseen, or is blamed on the wrong thing."""

from __future__ import annotations

import contextlib
import json
import math
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import rung
from rung.engine.signals import Arrived, Signals
from rung.errors import CheckpointError, UserError
from rung.runs.metrics import read_rows, read_tables
from rung.script import capture, pytree
from rung.script.guard import ScriptGuard
from tests.errors import raises_code

ROOT = Path(__file__).resolve().parents[2]
BAD = 17
Batch = dict[str, Tensor]
Make = Callable[[nn.Module], list[torch.optim.Optimizer]]


class Net(nn.Module):
    """With dropout, running statistics and a table that nothing writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("table", torch.arange(50.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(torch.relu(self.norm(self.first(x)))))
        return out[:, 0]


class Loop:
    """A plain loop. `bad` is what happens to the batch of step BAD."""

    def __init__(self, make: Make, bad: Callable[[Batch], None] = lambda batch: None) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizers = make(self.model)
        self.bad = bad
        self.rows = torch.randn(640, 4, generator=torch.Generator().manual_seed(1))

    def batch(self, step: int, micro: int = 0, num_micros: int = 1) -> Batch:
        x = self.rows.roll(-16 * step, 0)[:16].clone().chunk(num_micros)[micro]
        batch = {"x": x, "y": x.sum(1), "weight": torch.ones(len(x))}
        if step == BAD and micro == num_micros - 1:
            self.bad(batch)
        return batch

    def loss(self, batch: Batch) -> Tensor:
        return (torch.log(batch["weight"]) + (self.model(batch["x"]) - batch["y"]) ** 2).mean()

    def plain(self, num_steps: int, clip: float = 0.0, num_micros: int = 1) -> None:
        for step in range(num_steps):
            for micro in range(num_micros):
                (self.loss(self.batch(step, micro, num_micros)) / num_micros).backward()
            if clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def guard(self, out: Path | None = None, **options: Any) -> ScriptGuard:
        return rung.guard(self.model, self.optimizers, loss=self.loss, out=out, **options)

    def guarded(self, guard: ScriptGuard, num_steps: int, num_micros: int = 1) -> list[bool]:
        applied = []
        for step in range(guard.number, num_steps):
            for micro in range(num_micros):
                batch = self.batch(step, micro, num_micros)
                value = self.loss(batch) / num_micros
                value.backward()
                guard.micro(value, batch)
            applied.append(guard.step())
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        return applied

    @property
    def everything(self) -> list[Tensor]:
        states = [v for o in self.optimizers for s in o.state.values() for v in s.values()]
        return [*self.model.state_dict().values(), *(v for v in states if isinstance(v, Tensor))]


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [torch.optim.SGD(matrices, 0.05, momentum=0.9), torch.optim.AdamW(rest, 1e-2, fused=True)]


OPTIMIZERS: dict[str, Make] = {
    "fused adamw": lambda model: [torch.optim.AdamW(model.parameters(), 1e-2, fused=True)],
    "foreach adamw": lambda model: [torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)],
    "sgd": lambda model: [torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)],
    "two": two,
}
each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
adamw = OPTIMIZERS["fused adamw"]


def nan_feature(batch: Batch) -> None:
    batch["x"][5, 1] = math.nan


def infinite_feature(batch: Batch) -> None:
    batch["x"][3] = math.inf


def log_of_zero(batch: Batch) -> None:
    batch["weight"][11] = 0.0


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


class Late(Signals):
    """As on a GPU: the host reads rows some steps after they were made."""

    def __init__(self, lag: int) -> None:
        super().__init__()
        self._lag = lag

    def ready(self, wait: bool = False) -> Iterator[Arrived]:
        while len(self._pending) > (0 if wait else self._lag):
            held = [self._pending.pop() for _ in range(len(self._pending) - 1)]
            yield from super().ready(wait=True)
            self._pending.extend(reversed(held))


@each_optimizer
@pytest.mark.parametrize("num_micros", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_healthy_loop_is_the_same_to_the_bit(make: Make, num_micros: int, clip: float, tmp_path: Path) -> None:
    plain = Loop(make)
    plain.plain(30, clip, num_micros)
    guarded = Loop(make)  # which seeds torch as the first did
    guard = guarded.guard(tmp_path / "out", clip=clip)
    assert guarded.guarded(guard, 30, num_micros) == [True] * 30
    guard.wait()
    assert same(plain.everything, guarded.everything)
    assert not list((tmp_path / "out").glob("0*"))  # no capture
    assert guard.failure is None


@each_optimizer
@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("num_micros", [1, 2])
def test_after_a_bad_step_everything_is_as_before_it(make: Make, lag: int, num_micros: int, tmp_path: Path) -> None:
    before = Loop(make)
    before.plain(BAD, num_micros=num_micros)
    loop = Loop(make, infinite_feature)
    guard = loop.guard(tmp_path, armed_steps=3)
    guard._core._signals = Late(lag)
    with pytest.raises(rung.Diverged, match=r"guard.replay\(\)") as raised:
        loop.guarded(guard, 60, num_micros)
    assert guard.number == BAD + 1 + lag
    assert raised.value.step == BAD
    assert raised.value.facts["micro"] == num_micros - 1
    assert same(before.everything, loop.everything)
    assert (tmp_path / f"{BAD:08d}" / "capture.0.json").is_file()
    assert all("found_inf" not in vars(optimizer) for optimizer in loop.optimizers)
    with pytest.raises(rung.Diverged):  # who goes on all the same is told again
        loop.guarded(guard, 60, num_micros)


def test_signals_are_what_one_computes_by_hand(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rate = nn.Linear(3, 2), 0.1
    optimizer = torch.optim.Adam(model.parameters(), rate, fused=True)
    guard = rung.guard(model, optimizer, out=tmp_path, clip=0.3, layers_every=5)
    x = torch.randn(8, 3)
    for step in range(12):
        value = (model(x) ** 2).mean()
        value.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        weights = [p.detach().clone() for p in model.parameters()]
        assert guard.step(value, x)
        optimizer.zero_grad()
        row = guard.signals[-1]
        norm = float(torch.cat([g.flatten() for g in gradients]).double().norm())
        assert row["step"] == step
        assert row["loss"] == value.item()
        assert row["norm"] == pytest.approx(norm, rel=1e-6)
        assert row["norm_clipped"] == pytest.approx(min(norm, 0.3), rel=1e-4)
        assert (row["lr"], row["skipped"]) == (rate, 0)
        if step < 5 or step % 5 == 0:
            table = guard.tables["tensors"][-1]
            changes = [float((p.detach() - w).norm()) for p, w in zip(model.parameters(), weights)]
            assert (table["step"], table["names"]) == (step, ["weight", "bias"])
            assert table["grad"] == pytest.approx([float(g.norm()) for g in gradients], rel=1e-5)
            assert table["weight"] == pytest.approx([float(w.norm()) for w in weights], rel=1e-5)
            assert table["update"] == pytest.approx(changes, rel=1e-5)
    assert [row["loss"] for row in read_rows(tmp_path / "metrics")] == [row["loss"] for row in guard.signals]
    assert [table["step"] for table in read_tables(tmp_path / "tables")["tensors"]] == [0, 1, 2, 3, 4, 5, 10]


@each_optimizer
def test_skipping_is_as_if_the_batch_had_not_come(make: Make, tmp_path: Path) -> None:
    """Without dropout, whose random numbers the bad step has used up."""
    loops = [Loop(make, nan_feature) for _ in range(2)]
    for loop in loops:
        loop.model.drop.p = 0.0
    guard = loops[0].guard(tmp_path, policy="skip")
    applied = loops[0].guarded(guard, 30)
    assert [step for step, was_applied in enumerate(applied) if not was_applied] == [BAD]
    for step in [step for step in range(30) if step != BAD]:
        loops[1].loss(loops[1].batch(step)).backward()
        for optimizer in loops[1].optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert same(loops[0].everything, loops[1].everything)
    assert [event["kind"] for event in guard.events] == ["diverged", "skip"]
    verdict = guard.replay()  # from the folder: the loop has gone on
    assert (verdict.origin, verdict.samples) == ("DATA", [5])
    assert same(loops[0].everything, loops[1].everything)


def test_skipping_has_an_end(tmp_path: Path) -> None:
    loop = Loop(adamw)
    guard = loop.guard(tmp_path, policy="skip", most=2)
    loop.rows[100:] = math.nan
    with pytest.raises(rung.Diverged):
        loop.guarded(guard, 30)
    assert len([event for event in guard.events if event["kind"] == "skip"]) == 2


class Expected(NamedTuple):
    bad: Callable[[Batch], None]
    op: str
    sample: int
    told: str


@pytest.mark.parametrize("is_other_process", [False, True])
@pytest.mark.parametrize(
    "expected",
    [
        Expected(nan_feature, "aten.addmm", 5, "'x' of row 5"),
        Expected(log_of_zero, "aten.log", 11, "the data is finite"),
    ],
    ids=["nan feature", "log of zero"],
)
def test_replay_names_the_operation_and_the_sample(expected: Expected, is_other_process: bool, tmp_path: Path) -> None:
    loop = Loop(adamw, expected.bad)
    guard = loop.guard(tmp_path)
    with pytest.raises(rung.Diverged, match=expected.told) as raised:
        loop.guarded(guard, 30)
    before, other, generator = [t.clone() for t in loop.everything], Loop(adamw), torch.get_rng_state()
    if is_other_process:
        verdict = rung.replay(raised.value.facts["capture"], other.model, other.optimizers, other.loss)
        assert same(other.everything, before)
    else:
        verdict = guard.replay()
        assert same(loop.everything, before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert (verdict.origin, verdict.step, verdict.micro) == ("DATA", BAD, 0), verdict.lines()
    assert (verdict.op, verdict.samples) == (expected.op, [expected.sample])
    assert verdict.line.rpartition(":")[0].endswith("test_guard.py")
    assert verdict.not_tested == ["older weights: none available"]


def test_the_micro_is_named(tmp_path: Path) -> None:
    loop = Loop(adamw, nan_feature)
    guard = loop.guard(tmp_path)
    with pytest.raises(rung.Diverged):
        loop.guarded(guard, 30, num_micros=2)
    verdict = guard.replay()
    assert (verdict.micro, verdict.samples) == (1, [5])


def test_a_fault_that_does_not_come_back_is_transient() -> None:
    loop = Loop(adamw)
    guard = loop.guard()
    plain, calls = loop.loss, iter(range(1000))
    loop.loss = lambda batch: plain(batch) * (math.nan if next(calls) == BAD else 1.0)  # type: ignore[method-assign]
    with pytest.raises(rung.Diverged, match="not kept on disk"):
        loop.guarded(guard, 30)
    assert guard.replay().origin == "TRANSIENT"


def test_random_numbers_of_the_step_are_drawn_again() -> None:
    """The step fails only with the mask that dropout drew in it."""
    torch.manual_seed(3)
    model, drop = nn.Linear(4, 4), nn.Dropout(0.5)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def loss(batch: Tensor) -> Tensor:
        return (drop(model(batch)) / (drop(torch.ones(8)) != 0).any()).mean()  # 0/0 in one of 256 steps

    guard = rung.guard(model, optimizer, loss)

    def steps() -> None:
        for _ in range(5000):
            x = torch.ones(2, 4)
            value = loss(x)
            value.backward()
            guard.step(value, x)
            optimizer.zero_grad()

    with pytest.raises(rung.Diverged):
        steps()
    verdict = guard.replay()
    assert verdict.op == "aten.div"
    assert verdict.origin != "TRANSIENT"


def test_it_is_told_when_something_else_draws_too() -> None:
    loop = Loop(adamw, nan_feature)
    plain = loop.batch
    loop.batch = lambda *place: (torch.rand(3), plain(*place))[1]  # type: ignore[method-assign]
    guard = loop.guard()
    with pytest.raises(rung.Diverged):
        loop.guarded(guard, 30)
    assert "random numbers" in guard.replay().not_tested[0]


def test_an_update_that_breaks_weights_is_undone(tmp_path: Path) -> None:
    """Half precision weights under AdamW: its eps is 0 there, and 0 / 0 is made of a gradient of 0."""
    model = nn.Embedding(6, 4).half()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False, fused=False)
    loss = lambda ids: model(ids).float().pow(2).mean()  # noqa: E731
    guard = rung.guard(model, optimizer, loss, tmp_path)
    before, ids = model.weight.detach().clone(), torch.tensor([0, 1])
    value = loss(ids)
    value.backward()
    with pytest.raises(rung.Diverged, match="the update would have broken weight") as raised:
        guard.step(value, ids)
    assert torch.equal(model.weight.detach(), before)
    assert not optimizer.state
    for verdict in (guard.replay(), rung.replay(raised.value.facts["capture"], model, optimizer, loss)):
        assert verdict.origin == "OPTIMIZER"
        assert "eps" in verdict.what


@pytest.mark.parametrize("make", [OPTIMIZERS["fused adamw"], OPTIMIZERS["foreach adamw"]], ids=["fused", "foreach"])
@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_scales_as_it_does_without_us(make: Make, unscales: bool) -> None:
    """The first scale is too large: overflows are calibration, and the same steps are left out."""
    loops, scalers = [], []
    for is_guarded in (False, True):
        loop, scaler = Loop(make), torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=5)
        guard = loop.guard(scaler=scaler) if is_guarded else None
        for step in range(25):
            batch = loop.batch(step)
            value = loop.loss(batch)
            scaler.scale(value).backward()
            if unscales:
                scaler.unscale_(loop.optimizers[0])
                nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
            if guard is not None:
                guard.step(value, batch)
            else:
                scaler.step(loop.optimizers[0])
                scaler.update()
            loop.optimizers[0].zero_grad()
        loops.append(loop)
        scalers.append(scaler.get_scale())
        if guard is not None:
            skipped = [row["step"] for row in guard.signals if row["skipped"]]
            assert len(skipped) > 1
            assert guard.failure is None
    assert same(loops[0].everything, loops[1].everything)
    assert scalers[0] == scalers[1]


def test_a_scaler_does_not_hide_a_bad_loss() -> None:
    loop, scaler = Loop(adamw, nan_feature), torch.amp.GradScaler("cpu", init_scale=1024.0)
    guard = loop.guard(scaler=scaler)

    def steps() -> None:
        for step in range(30):
            batch = loop.batch(step)
            value = loop.loss(batch)
            scaler.scale(value).backward()
            guard.step(value, batch)
            loop.optimizers[0].zero_grad()

    with pytest.raises(rung.Diverged, match="loss nan"):
        steps()
    assert scaler.get_scale() == 1024.0
    verdict = guard.replay()
    assert (verdict.origin, verdict.samples) == ("DATA", [5])


@pytest.mark.parametrize("is_inside", [True, False])
def test_an_overflow_of_float16_is_precision(is_inside: bool) -> None:
    """Wherever the loop enters autocast. One object serves all steps, and is left as it was."""
    model = nn.Linear(256, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    half = torch.autocast("cpu", torch.float16)

    def bare(batch: tuple[Tensor, str]) -> Tensor:
        return model(batch[0]).float().pow(2).mean()

    def inside(batch: tuple[Tensor, str]) -> Tensor:
        with half:
            return bare(batch)

    loss = inside if is_inside else bare
    guard = rung.guard(model, optimizer, loss, autocast=None if is_inside else torch.float16)

    def steps() -> None:
        for size in (1.0, 1.0, 4e5):  # float16 ends at 65504
            batch = (torch.full((4, 256), size), "a word")
            with contextlib.nullcontext() if is_inside else half:
                value = loss(batch)
            value.backward()
            guard.step(value, batch)
            optimizer.zero_grad()

    with pytest.raises(rung.Diverged):
        steps()
    verdict = guard.replay()
    assert verdict.origin == "PRECISION", verdict.lines()
    assert half._enabled
    assert half.fast_dtype is torch.float16


def test_findings_are_those_of_the_doctor() -> None:
    loop = Loop(adamw, nan_feature)
    guard = loop.guard()
    with pytest.raises(rung.Diverged):
        loop.guarded(guard, 30)
    found = guard.findings()
    assert [(f.rule, f.severity, f.since, f.probe) for f in found] == [("N1", "fatal", BAD, "guard.replay()")]


def test_a_healthy_loop_has_no_findings() -> None:
    loop = Loop(adamw)
    guard = loop.guard(clip=1.0)
    loop.guarded(guard, 150)
    assert [f for f in guard.findings() if f.severity != "info"] == []


def test_a_frozen_layer_is_found() -> None:
    loop = Loop(adamw)
    loop.model.first.weight.data.zero_()
    loop.model.first.weight.register_hook(torch.zeros_like)
    loop.optimizers[0].param_groups[0]["weight_decay"] = 0.0
    guard = loop.guard()
    loop.guarded(guard, 100)
    assert any("first.weight" in f.what + " ".join(f.evidence) for f in guard.findings())


class Point(NamedTuple):
    x: Tensor
    label: Any


@dataclass
class Example:
    x: Tensor
    more: Any


leaves = st.one_of(
    st.integers(), st.text(max_size=3), st.none(), st.booleans(),
    st.integers(0, 3).map(lambda n: torch.arange(float(n))), st.integers(0, 3).map(lambda n: np.arange(n)),
)  # fmt: skip
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        inner.map(lambda value: Point(torch.ones(2), value)),
        inner.map(lambda value: Example(torch.ones(2), value)),
    ),
    max_leaves=8,
)


@given(nests)
@settings(max_examples=60, deadline=None)
def test_batches_of_any_nesting_come_back(batch: Any) -> None:
    doubled = pytree.with_tensors(batch, lambda name, tensor: tensor * 2)
    assert type(doubled) is type(batch)
    tensors = pytree.tensors_of(batch)
    assert list(pytree.tensors_of(doubled)) == list(tensors)
    assert all(torch.equal(t, tensors[name] * 2) for name, t in pytree.tensors_of(doubled).items())
    lost: list[str] = []
    written: dict[str, Tensor] = {}
    read = pytree.from_json(json.loads(json.dumps(pytree.to_json(batch, "0", written, lost))), written)
    assert not lost
    assert {n: t.tolist() for n, t in pytree.tensors_of(read).items()} == {n: t.tolist() for n, t in tensors.items()}
    if isinstance(batch, Point | Example):
        assert torch.equal(read.x, batch.x)  # by attribute, as the loss reads it


@pytest.mark.parametrize(
    "odd",
    [torch.tensor(math.nan), torch.full((2, 5), math.nan), (torch.ones(3), [torch.tensor([1.0, math.inf])])],
    ids=["a scalar", "another first axis", "nested"],
)
def test_odd_batches_are_looked_at(odd: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(batch: dict[str, Any]) -> Tensor:
        return model(batch["x"]).mean() + sum(t.sum() for t in pytree.tensors_of(batch["odd"]).values())

    guard = rung.guard(model, optimizer, loss, tmp_path)
    batch = {"x": torch.ones(8, 4), "odd": odd}
    value = loss(batch)
    value.backward()
    with pytest.raises(rung.Diverged, match="the data is not finite: 'odd") as raised:
        guard.step(value, batch)
    for verdict in (guard.replay(), rung.replay(raised.value.facts["capture"], model, optimizer, loss)):
        assert verdict.origin == "DATA", verdict.lines()
        assert verdict.what.startswith("odd")


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    loop = Loop(adamw, nan_feature)
    guard = loop.guard(tmp_path)
    plain = loop.batch
    loop.batch = lambda *place: plain(*place) | {"object": object()}  # type: ignore[method-assign]
    with pytest.raises(rung.Diverged) as raised:
        loop.guarded(guard, 30)
    other = Loop(adamw)
    verdict = rung.replay(raised.value.facts["capture"], other.model, other.optimizers, other.loss)
    assert "object (object) of the batch: it could not be kept" in verdict.not_tested
    assert (verdict.origin, verdict.samples) == ("DATA", [5])


def test_a_loss_that_takes_no_fewer_rows_blames_no_sample() -> None:
    loop = Loop(adamw, nan_feature)
    plain = loop.loss
    loop.loss = lambda batch: plain(batch) + 0 * batch["x"].view(16, 4)[15, 0]  # type: ignore[method-assign]
    guard = loop.guard()
    with pytest.raises(rung.Diverged):
        loop.guarded(guard, 30)
    verdict = guard.replay()
    assert verdict.origin == "DATA"
    assert "the sample: the loss does not take fewer rows" in verdict.not_tested


def test_parameters_that_join_later_are_guarded_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model[1].parameters(), 1e-2, fused=True)
    guard = rung.guard(model, optimizer, armed_steps=2)
    for step in range(20):
        if step == 10:
            optimizer.add_param_group({"params": list(model[0].parameters())})
        value = model(torch.randn(8, 4)).pow(2).mean() * (math.nan if step == 15 else 1.0)
        value.backward()
        if step < 15:
            guard.step(value)
            optimizer.zero_grad()
    assert len(guard.tables["tensors"][-1]["names"]) == 4
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(rung.Diverged):
        guard.step(value)
    assert same(before, [p.detach() for p in model.parameters()])


def test_sparse_gradients_are_judged() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(list(model.parameters()), 1e-2)
    guard = rung.guard(model, optimizer)

    def step(size: float) -> None:
        optimizer.zero_grad()
        value = (model(torch.tensor([1, 1, 4])).sum() * size).clamp(max=1e30)
        value.backward()
        guard.step(value)

    for _ in range(3):
        step(1.0)
        assert model.weight.grad is not None
        assert guard.signals[-1]["norm"] == pytest.approx(float(model.weight.grad.to_dense().norm()))
    before = model.weight.detach().clone()
    with pytest.raises(rung.Diverged, match="norm"):
        step(-math.inf)
    assert torch.equal(model.weight.detach(), before)


def test_mistakes_are_told_in_one_sentence(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with raises_code("bad-model"):
        rung.guard(None, optimizer)  # type: ignore[arg-type]
    with raises_code("bad-optimizer"):
        rung.guard(model, None)  # type: ignore[arg-type]
    with raises_code("bad-value"):
        rung.guard(model, optimizer, policy="restart")
    with raises_code("bad-optimizer"):
        rung.guard(nn.Linear(2, 1), optimizer)
    guard = rung.guard(model, optimizer)
    with raises_code("no-loss"):
        guard.step()
    with raises_code("bad-loss"):
        guard.step(torch.ones(3))
    with raises_code("no-capture"):
        guard.replay()
    with pytest.raises(UserError, match="is not a capture"):
        rung.replay(tmp_path, model, optimizer, lambda batch: batch)
    assert isinstance(rung.guard(model, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False)), ScriptGuard)


def test_nothing_is_written_before_the_first_step_nor_imported_before_it_is_asked_for(tmp_path: Path) -> None:
    Loop(adamw).guard(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    code = "import sys, rung; assert 'torch' not in sys.modules; rung.Diverged; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_example_finds_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "guarded_loop.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "loss nan" in printed
    assert "DATA" in printed
    assert "aten.log" in printed
    assert "sample 3" in printed
    assert (tmp_path / "captures" / "00000040" / "capture.0.json").is_file()


def test_compiled_models_are_kept_and_replayed_as_what_they_are(tmp_path: Path) -> None:
    loop = Loop(adamw, log_of_zero)
    whole = loop.model
    loop.model = torch.compile(whole, backend="aot_eager")  # type: ignore[assignment]
    guard = loop.guard(tmp_path)
    with pytest.raises(rung.Diverged) as raised:
        loop.guarded(guard, 30)
    verdict = guard.replay()
    assert (verdict.origin, verdict.op, verdict.samples) == ("DATA", "aten.log", [11]), verdict.lines()
    other = Loop(adamw)
    verdict = rung.replay(raised.value.facts["capture"], other.model, other.optimizers, other.loss)
    assert (verdict.origin, verdict.op, verdict.samples) == ("DATA", "aten.log", [11])
    assert "compiled: it was so when it was recorded, and is not here" in verdict.not_tested


def test_what_is_unfrozen_later_is_judged() -> None:
    loop = Loop(adamw)
    loop.model.first.requires_grad_(False)
    guard = loop.guard(armed_steps=0)
    loop.guarded(guard, 5)
    loop.model.first.requires_grad_(True)
    loop.model.first.weight.register_hook(lambda grad: grad * math.nan)
    before = [p.detach().clone() for p in loop.model.parameters()]
    with pytest.raises(rung.Diverged, match="norm nan"):
        loop.guarded(guard, 6)
    assert same([p.detach() for p in loop.model.parameters()], before)


def test_a_large_frozen_part_is_not_written_with_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MOST_FROZEN", 1000)

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1))
        model[0].requires_grad_(False)
        return model, torch.optim.AdamW(model[1].parameters())

    model, optimizer = build(0)
    guard = rung.guard(model, optimizer, loss=lambda batch: model(batch).mean(), out=tmp_path)
    value = model(batch := torch.full((2, 4), torch.nan)).mean()
    value.backward()
    with pytest.raises(rung.Diverged):
        guard.step(value, batch)
    kept = load_file(tmp_path / "00000000" / "model.safetensors")
    assert sorted(kept) == ["1.bias", "1.weight"]
    again, its = build(0)
    assert rung.replay(tmp_path / "00000000", again, its, lambda batch: again(batch).mean()).origin == "DATA"
    other, its = build(1)
    with pytest.raises(CheckpointError):
        rung.replay(tmp_path / "00000000", other, its, lambda batch: other(batch).mean())

"""If this fails, `rung check` is wrong about a run's plan: its rate, its keys, its code, its time, memory and disk."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rung.config import key, section
from rung.doctor.preflight import copies, plan
from rung.doctor.preflight.checks import all_checks
from rung.doctor.preflight.result import Check, CheckContext, Result
from rung.engine.build import Setup
from rung.engine.loop import fit
from rung.engine.schedule import Schedule
from rung.random import Draw
from rung.recipe import Batch, Loss
from tests.cases import tiny
from tests.cases.plan_cases import Forgetful, repository
from tests.cases.running import Mute, setup_of
from tests.cases.tiny import Tiny

SHAPES = ("cosine", "linear", "wsd")


def results(check: Check, *overrides: str, recipe: type[Tiny] = Tiny, **shared: object) -> list[Result]:
    return list(check(CheckContext(setup_of(recipe, *overrides), shared=shared)))


def named(name: str) -> Check:
    return next(check for check in all_checks() if check.name == name)


@given(st.sampled_from(SHAPES), st.integers(20, 30_000), st.floats(0, 0.2), st.floats(0, 1), st.floats(0, 1))
def test_a_schedule_that_ends_with_the_run_is_sound(
    shape: str, num_steps: int, warm: float, floor: float, start: float
) -> None:
    s = Schedule(shape, 1e-3, 0.9e-3 * floor, 1e-3 * start, int(warm * num_steps), num_steps)
    assert list(plan.schedule_faults(s, num_steps)) == []
    assert plan.largest_jump(s, num_steps) is None


@given(st.sampled_from(SHAPES), st.integers(100, 5000), st.floats(0.05, 0.9) | st.floats(1.06, 5))
def test_a_horizon_that_is_not_the_run_is_named(shape: str, num_steps: int, share: float) -> None:
    s = Schedule(shape, 1e-3, 0, 0, 5, max(6, round(num_steps / share)))
    assert list(plan.schedule_faults(s, num_steps))


def test_the_numbers_the_binding_limit_and_the_key_are_named() -> None:
    [found] = results(named("schedule against budget"), "optimizer.max_iters=2 epochs, 900", "lr.lr_decay_iters=1000")
    assert found.level == "warn"
    for part in ("250 steps planned", "limited by epochs", "over 1000", "0.25 of the schedule"):
        assert part in found.seen
    assert "lr.lr_decay_iters=250" in found.remedy


def test_a_run_that_time_ends_is_judged_by_the_rehearsal(tmp_path: Path) -> None:
    overrides = "optimizer.max_iters=100 s", "lr.lr_decay_iters=100"
    [early] = results(named("schedule against budget"), *overrides)
    assert early.level == "skip"
    late = {r.name: r for r in results(named("rehearsal"), *overrides, runs_root=tmp_path)}
    assert late["rehearsal: schedule"].level == "warn"


@pytest.mark.parametrize("overrides", [
    ("lr.schedule=constant",), ("lr.schedule=wsd",), ("lr.schedule=linear", "lr.min_lr=1e-4"),
    ("lr.schedule=plateau", "eval_interval=10"), ("lr.decay_lr=false",), ("lr.warmup_iters=0",),
])  # fmt: skip
def test_declared_shapes_pass(overrides: tuple[str, ...]) -> None:
    found = [
        r
        for name in ("schedule against budget", "warm-up", "shape of the rate")
        for r in results(named(name), *overrides)
    ]
    assert [r.level for r in found] == ["pass"] * 3


def test_a_plateau_that_never_comes_is_named() -> None:
    [found] = results(named("shape of the rate"), "lr.schedule=plateau", "eval_interval=100")
    assert found.level == "warn"
    assert "evals" in found.seen


def test_keys_that_the_loop_reads_are_not_called_unread(tmp_path: Path) -> None:
    """Every key of LATE that is set has been read by the end of a run, but those of the command line."""
    setup = setup_of(Tiny, "optimizer.max_iters=4", "lr.warmup_iters=1", "sample_interval=2", "checkpoint.keep=1",
                     "guard.policy=stop", "guard.armed_steps=2", "guard.most=3", "signals.probes=false",
                     "signals.doctor=false", root=tmp_path)  # fmt: skip
    assert not any(r.level == "warn" for r in named("unread keys")(CheckContext(setup)))
    fit(setup, None, Mute())
    of_rank_0 = {"guard.most", "signals.doctor", "checkpoint.keep"}  # a run without a record reads fewer
    assert set(setup.config.unread()) <= of_rank_0


def test_an_unread_key_is_named_with_its_line() -> None:
    [found] = results(named("unread keys"), "patience=5", recipe=Forgetful)
    assert found.level == "warn"
    assert "patience=5 (Read by nothing.)" in found.seen


def test_momentum_has_no_effect_with_adamw() -> None:
    [found] = results(named("unread keys"), "optimizer.momentum=0.9")
    assert found.level == "warn"
    assert "optimizer.momentum=0.9" in found.seen


@dataclass
class Model(tiny.Model):
    context_size: int = key(32, "Places that the model has.", low=1)


@dataclass
class Data:
    context_size: int = key(32, "Ids in a row.", low=1)


@dataclass
class Twins(tiny.Config):
    model: Model = section(Model, "The network.")
    data: Data = section(Data, "Rows.")


class TwoSizes(Tiny):
    Config = Twins


def test_twin_keys_must_agree() -> None:
    assert [r.level for r in results(named("twin keys"), recipe=TwoSizes)] == ["pass"]
    [found] = results(named("twin keys"), "data.context_size=64", recipe=TwoSizes)
    assert found.level == "warn"
    assert "model.context_size=32, but data.context_size=64" in found.seen


@dataclass
class Head:
    context_size: int = key(32, "Ids that the head reads.", low=1)


@dataclass
class Body(Model):
    head: Head = section(Head, "A part of the network.")


@dataclass
class OnePart(tiny.Config):
    model: Body = section(Body, "The network.")  # type: ignore[assignment]


class WithAPart(Tiny):
    Config = OnePart


def test_parts_of_one_section_have_sizes_of_their_own() -> None:
    [found] = results(named("twin keys"), "model.head.context_size=64", recipe=WithAPart)
    assert found.level == "pass"


def test_changed_and_new_code_is_named_and_data_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, folder = named("committed code"), repository(tmp_path / "code")
    context = CheckContext(setup_of(Tiny))
    monkeypatch.chdir(folder)
    (folder / "frames.csv").write_text("1")
    assert [r.level for r in check(context)] == ["pass"]
    for number in range(7):
        (folder / f"new{number}.py").write_text("x = 1\n")
    [found] = check(context)
    assert found.level == "warn"
    assert "7 files" in found.seen
    assert "new0.py" in found.seen
    assert "2 more" in found.seen


def test_outside_of_git_a_copy_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = CheckContext(setup_of(Tiny))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    [found] = named("committed code")(context)
    assert (found.level, "copy" in found.seen) == ("skip", True)


def test_a_recipe_that_lies_elsewhere_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = repository(tmp_path / "home")
    (home / "other").mkdir()
    away = tmp_path / "away"
    away.mkdir()
    (away / "my_recipe.py").write_text("from tests.cases.tiny import Tiny\nclass Mine(Tiny): pass\n")
    monkeypatch.syspath_prepend(str(away))
    import my_recipe  # type: ignore[import-not-found]

    try:
        context = CheckContext(setup_of(my_recipe.Mine))
        monkeypatch.chdir(home / "other")
        [found] = named("recipe in the kept folder")(context)
        assert found.level == "warn"
        assert "my_recipe.py" in found.seen
        subprocess.run(["git", "init", "-q"], cwd=away, check=True)
        monkeypatch.chdir(away)
        assert [r.level for r in named("recipe in the kept folder")(context)] == ["pass"]
        (away / ".gitignore").write_text("my_*\n")
        assert [r.level for r in named("recipe in the kept folder")(context)] == ["warn"]
    finally:
        del sys.modules["my_recipe"]


def test_the_rehearsal_foretells_and_leaves_nothing_behind(tmp_path: Path) -> None:
    found = {r.name: r for r in results(named("rehearsal"), "checkpoint.every=50", runs_root=tmp_path)}
    assert {r.level for r in found.values()} == {"pass"}
    assert "150 steps, 6 evals and 3 saves" in found["rehearsal: time"].seen
    assert "3 saves" in found["rehearsal: disk"].seen
    assert list(tmp_path.iterdir()) == []


def test_what_a_save_brought_back_is_what_was_saved(tmp_path: Path) -> None:
    setup = setup_of(Tiny)
    before = {name: tensor.clone() for name, tensor in setup.state.model.state_dict().items()}
    list(named("rehearsal")(CheckContext(setup, shared={"runs_root": tmp_path})))
    after = setup.state.model.state_dict()
    assert setup.state.progress.step == 2
    assert any(not torch.equal(before[name], after[name]) for name in before)  # it was trained, on purpose
    assert all(torch.isfinite(tensor).all() for tensor in after.values())


class TooLarge(Tiny):
    """Fits with the two rows that others look at, not with sixteen."""

    def objectives(self, model: torch.nn.Module):  # type: ignore[no-untyped-def]
        [objective] = super().objectives(model)

        def loss(batch: Batch, draw: Draw) -> Loss:
            if len(batch["ids"]) > 8:
                raise torch.OutOfMemoryError("tried to allocate 7 GiB")
            return objective.loss(batch, draw)

        return [objective._replace(loss=loss)]


def test_what_does_not_fit_is_refused_with_the_same_step_in_smaller_parts(tmp_path: Path) -> None:
    [found] = results(named("rehearsal"), recipe=TooLarge, runs_root=tmp_path)
    assert found.level == "fail"
    assert "data.batch_size=16" in found.seen
    assert "data.batch_size=8 optimizer.gradient_accumulation_steps=2" in found.remedy


class Moody(Tiny):
    """Another loss in each build: what a kernel that computes something else looks like."""

    builds = 0

    def objectives(self, model: torch.nn.Module):  # type: ignore[no-untyped-def]
        [objective] = super().objectives(model)
        type(self).builds += 1
        factor = 1.0 + 0.05 * type(self).builds

        def loss(batch: Batch, draw: Draw) -> Loss:
            found = objective.loss(batch, draw)
            return Loss(found.sum * factor, found.count)

        return [objective._replace(loss=loss)]


def on_cpu(setup: Setup) -> Setup:
    return copies.copy_of(setup, device="cpu", dtype="float32")


def test_two_devices_that_differ_are_named_and_two_that_agree_pass() -> None:
    setup = setup_of(Tiny, "model.dropout=0.5")
    assert copies.compare(setup, on_cpu(setup)).level == "pass"
    assert all(parameter.grad is None for parameter in setup.state.model.parameters())
    setup = setup_of(Moody)
    assert copies.compare(setup, on_cpu(setup)).level == "fail"
    [found] = results(named("same on the CPU"))
    assert found.level == "skip"


def test_bfloat16_is_within_its_limit() -> None:
    setup = setup_of(Tiny, "system.dtype=bfloat16")
    assert copies.compare(setup, on_cpu(setup)).level == "pass"

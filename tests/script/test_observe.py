"""If this fails, `rung.init` changes a loop that it only looks at, keeps its model alive, or ends it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from rung.doctor.diagnose import ask
from rung.doctor.history import read
from rung.runs.query import Run, open_run
from rung.script.observe import Switches
from rung.script.run import OwnRun
from tests.script.test_run import ROOT, ended

Start = Callable[..., OwnRun]


def train(run: OwnRun | None, num_steps: int = 80) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        loss = model(torch.randn(16, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if run is not None:
            run.log({"loss": loss})
    return model


def observed_in(run: Run) -> dict[str, Any]:
    return list(run.events("observed"))[-1]


def test_what_is_learned_is_the_same_to_the_bit_and_rates_are_recorded(start: Start) -> None:
    bare = train(None)
    run = start()
    seen = train(run)
    assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), seen.parameters(), strict=True))
    found = ended(run)
    lr = found.metrics(["lr"])["lr"]
    assert lr[1:] == [1e-2] * 79  # torch was looked at from the first row on
    observed = observed_in(found)
    assert (observed["rows"], observed["num_tensors"], observed["moved"], observed["accumulates"]) == (80, 4, 4, False)


@pytest.mark.parametrize(("lr", "low", "high"), [(1e-6, 1e-5, 1e-3), (1e-3, 0.01, 0.25), (0.1, 0.25, 100.0)])
def test_the_distance_from_the_first_weights_is_known(lr: float, low: float, high: float, start: Start) -> None:
    run = start()
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(70):
        loss = (model(torch.randn(16, 4)) - 3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss})
    assert low < observed_in(ended(run))["displaced"] < high


def test_a_model_is_not_kept_alive_and_no_hook_is_left(start: Start) -> None:
    before = len(torch_optimizer._global_optimizer_post_hooks)
    run = start()
    gone = weakref.ref(train(run))
    gc.collect()
    assert gone() is None
    run.finish()
    assert len(torch_optimizer._global_optimizer_post_hooks) == before


def test_an_observer_that_fails_is_told_once_and_training_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start()
    monkeypatch.setattr("rung.script.observe.in_sight", lambda: 1 / 0)
    train(run)
    found = ended(run)
    assert len(found.metrics(["loss"])["loss"]) == 80
    (event,) = (e for e in found.events("warning") if "observed" in e["text"])
    assert "ZeroDivisionError" in event["text"]


class Kahan(torch.optim.SGD):
    """As optimizers that keep what rounding took, and add it to a later update."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("compensation", torch.zeros_like(parameter))
        return super().step(closure)


@pytest.mark.parametrize(
    ("dtype", "lr", "kind", "is_lost"),
    [
        (torch.bfloat16, 1e-4, torch.optim.AdamW, True), (torch.bfloat16, 0.1, torch.optim.AdamW, False),
        (torch.float32, 1e-7, torch.optim.AdamW, False), (torch.bfloat16, 1e-4, Kahan, False),
    ],
)  # fmt: skip
def test_updates_that_half_precision_loses_are_seen(
    dtype: torch.dtype, lr: float, kind: type[torch.optim.Optimizer], is_lost: bool, start: Start
) -> None:
    torch.manual_seed(0)
    run, model = start(), nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)).to(dtype)
    optimizer = kind(model.parameters(), lr=lr)  # type: ignore[call-arg]
    for step in range(60):
        loss = model(torch.randn(16, 4, dtype=dtype)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss}, step=step)
    history = read(ended(run))
    half = history.derived["observed"].get("half", {})
    assert (dtype is torch.float32 or kind is Kahan) == (half == {})
    found = [f for answer in ask(history, raises=True) if answer.rule.id == "L1" for f in answer.findings]
    assert [f.severity for f in found if "bfloat16" in f.what] == (["warn"] if is_lost else [])


def test_eval_mode_is_counted_only_while_somebody_observes(start: Start) -> None:
    original = nn.Module.train
    first, second = start("a"), start("b", reinit="create_new")
    model = train(first, 20)
    train(second, 20)
    assert nn.Module.train is not original
    before = Switches.count
    assert not model.eval().training
    assert model.train().training
    assert Switches.count == before + 4  # the model and each of its parts, as torch does it
    first.finish()
    assert nn.Module.train is not original
    second.finish()
    assert nn.Module.train is original


def test_two_runs_at_a_time_and_one_after_the_other(start: Start) -> None:
    first, second = start("a"), start("b", reinit="create_new")
    train(first, 30)
    train(second, 60)
    assert observed_in(ended(second))["updates"] >= 59
    assert observed_in(ended(first))["rows"] == 30


@pytest.mark.parametrize(
    "words",
    [
        "import rung\nrun = rung.init('late')\nimport torch",
        "import torch, rung\nrun = rung.init('forked')\nimport os\nif os.fork() == 0: os._exit(0)",
    ],
    ids=["torch after init", "fork"],
)
def test_torch_may_come_later_and_processes_may_fork(words: str, tmp_path: Path) -> None:
    script = f"""{words}
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 2)).square().mean()
    loss.backward()
    optimizer.step()
    run.log({{"loss": loss}})
"""
    (tmp_path / "train.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, check=True, capture_output=True)
    run = next(path for path in (tmp_path / "runs").iterdir() if path.is_dir()).name
    observed = observed_in(open_run(run, tmp_path / "runs"))
    assert (observed["rows"], observed["moved"]) == (40, 2)


def test_a_key_is_derived_from_another_only_where_their_values_agree(start: Start) -> None:
    run = start(config={"wd": 0.3, "adam_eps": 1e-8, "betas": [0.9, 0.98]})
    model = nn.Linear(2, 1)
    run.watch(model, torch.optim.AdamW(model.parameters(), weight_decay=0.01, betas=(0.9, 0.98)))
    sources = ended(run).sources()
    assert sources["optimizer.weight_decay"] == "the optimizer"
    assert sources["optimizer.eps"] == "derived: from adam_eps"
    assert sources["optimizer.beta2"] == "derived: from betas"


def answers(run: OwnRun) -> dict[str, str]:
    """Each rule that looked, with the severity of what it found."""
    found = ask(read(ended(run)), raises=True)
    return {a.rule.id: a.findings[0].severity if a.findings else "healthy" for a in found if not a.why_not}


def rows_of(run: OwnRun, pick: Callable[[int], Any], num_steps: int = 200) -> dict[str, str]:
    run.data("train", np.arange(800))
    for step in range(num_steps):
        run.rows(pick(step))
        run.log({"loss": 2.0 - step / 1000})
    return answers(run)


def test_rows_say_whether_data_is_shuffled_and_comes_whole(start: Start) -> None:
    order = np.random.default_rng(0).permutation(800)
    healthy = rows_of(start(), lambda step: torch.from_numpy(order[np.arange(step * 8, step * 8 + 8) % 800]))
    assert (healthy["D2"], healthy["D1"]) == ("healthy", "warn")  # each epoch in the order of the one before
    in_order = rows_of(start(), lambda step: list(range(step * 8 % 800, step * 8 % 800 + 8)))
    assert in_order["D1"] == "warn"
    again = rows_of(start(), lambda step: order[np.arange(step * 8, step * 8 + 8) % 160])  # a fifth, over and over
    assert again["D2"] == "sick"


@pytest.mark.parametrize(("worth", "severity"), [(0.0, "warn"), (0.5, "healthy")])
def test_an_input_is_worth_what_the_loss_loses_without_it(start: Start, worth: float, severity: str) -> None:
    run = start()
    for step in range(200):
        run.log({"loss": 2.0 - step / 1000})
        if step % 40 == 39:
            losses = torch.rand(64) + 1
            run.without("control", losses, losses * (1 + worth))
    assert answers(run)["C1"] == severity


def test_a_key_that_a_script_does_not_read_is_told_where_it_says_that_it_reads_all(start: Start) -> None:
    for is_said, unread in ((True, ["dropout", "model.width"]), (False, None)):
        run = start(config={"lr": 0.1, "dropout": 0.2, "model": {"width": 8, "depth": 2}})
        assert run.config.lr + run.config["model"]["depth"] == 2.1
        if is_said:
            run.config.check_read()
        run.log({"loss": 1.0})
        found = ended(run)
        assert [event["keys"] for event in found.events("unread_keys")] == ([unread] if is_said else [])


def test_targets_of_micros_say_what_the_smallest_had(start: Start) -> None:
    run = start()
    for step in range(3):
        for count in (8, 2 + step):
            run.targets(count)
        run.log({"loss": 1.0})
    columns = ended(run).metrics(["targets", "targets_min"])
    assert (columns["targets"], columns["targets_min"]) == ([10, 11, 12], [2, 3, 4])

"""If this fails, saves carry what nobody trains, or weights are put beside a frozen part they were not trained with."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rung.config import key
from rung.engine import capture, checkpoint
from rung.engine.build import Setup, restore
from rung.engine.fingerprints import CHUNK, fingerprint
from rung.random import Draw
from rung.recipe import Arrays, Batch, Loss, Objective, ParameterGroup, Recipe, Stream
from rung.runs.query import Run
from tests.cases.running import setup_of
from tests.errors import raises_code
from tests.forensics.failing import go_on, train, verdict_of

WIDE = 256
KEEP_ALL = ("checkpoint.every=2", "checkpoint.keep=0", "eval_interval=4")


@dataclass
class Keys:
    base: int = key(0, "Which base the recipe loads.")
    trains_base: bool = key(False, "Train the base too.")
    moves_base: bool = key(False, "The loss changes the frozen base by hand, as an average of weights does.")
    bad_from: int = key(10**6, "The step from which the loss is not finite.")


class Rows(Stream):
    num_rows, fingerprint = 64, "rows"

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        return {"x": np.random.default_rng(5).normal(size=(64, 4)).astype(np.float32)[ids]}


class Net(nn.Module):
    """A wide base out of a file, here out of a seed, and a small adapter."""

    def __init__(self, base: int) -> None:
        super().__init__()
        self.base, self.norm, self.adapter = nn.Linear(4, WIDE), nn.BatchNorm1d(4), nn.Linear(WIDE, 1)
        with torch.no_grad():
            self.base.weight.copy_(torch.randn(WIDE, 4, generator=torch.Generator().manual_seed(base)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.adapter(torch.tanh(self.base(self.norm(x))))
        return out


class Adapter(Recipe):
    Config = Keys
    cfg: Keys

    def streams(self) -> Mapping[str, Stream]:
        return {"train": Rows(), "val": Rows()}

    def model(self) -> nn.Module:
        model = Net(self.cfg.base)
        model.base.requires_grad_(self.cfg.trains_base)
        return model

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def loss(batch: Batch, draw: Draw) -> Loss:
            out = (model(batch["x"])[:, 0] - batch["x"].sum(1)).square().sum()
            if self.cfg.moves_base and not draw.is_eval:
                with torch.no_grad():
                    model.base.weight.data.mul_(0.9)
            scale = math.nan if draw.step >= self.cfg.bad_from else 1.0
            return Loss(out * scale, torch.tensor(float(len(batch["x"]))))

        return [Objective("fit", [ParameterGroup("all", model.parameters())], loss)]


FROZEN = {"base.weight", "base.bias"}


def save_at(run: Run, step: int) -> Path:
    return checkpoint.Checkpoints(run.path / "checkpoints").at(step)


def held(save: Path) -> set[str]:
    return set(load_file(save / "model.safetensors"))


def again(run: Run, step: int, *words: str) -> Setup:
    setup = setup_of(Adapter, "seed=1", *words)
    restore(setup, save_at(run, step))
    return setup


def weights_of(setup: Setup) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in setup.state.model.state_dict().items()}


def test_a_save_holds_what_is_trained_and_the_buffers(tmp_path: Path) -> None:
    run = train(Adapter, tmp_path, *KEEP_ALL)
    save = save_at(run, 4)
    everything = set(Net(0).state_dict())
    assert held(save) == everything - FROZEN
    assert "norm.running_mean" in held(save)
    assert set(json.loads((save / "state.json").read_text())["frozen"]) == FROZEN
    assert (save / "model.safetensors").stat().st_size < 4 * WIDE * 4  # the base's weight alone has as many bytes


def test_a_resume_builds_the_frozen_part_again_and_is_exact(tmp_path: Path) -> None:
    run = train(Adapter, tmp_path, *KEEP_ALL)
    model = again(run, 8).state.model
    assert torch.equal(model.base.weight, Net(0).base.weight)  # type: ignore[union-attr,arg-type]
    first = train(Adapter, tmp_path / "short", *KEEP_ALL, "optimizer.max_iters=4", "lr.lr_decay_iters=8")
    whole = go_on(first, Adapter, tmp_path / "short", *KEEP_ALL)
    last = [load_file(save_at(one, 8) / "model.safetensors") for one in (run, whole)]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


def test_other_frozen_weights_are_refused_with_the_remedy(tmp_path: Path) -> None:
    run = train(Adapter, tmp_path, *KEEP_ALL)
    with raises_code("checkpoint-mismatch") as error:
        again(run, 4, "base=1")
    assert re.search(r"base\.weight was float32 256x4 .*1 of 2 tensors", str(error.value))


def test_a_new_run_may_begin_beside_another_base_and_is_told(tmp_path: Path) -> None:
    run = train(Adapter, tmp_path, *KEEP_ALL)
    setup = setup_of(Adapter, "seed=1", "base=1", f"init_from={save_at(run, 8)}", root=tmp_path)
    assert any("base.weight" in line for line in setup.chosen)
    assert torch.equal(setup.state.model.base.weight, Net(1).base.weight)  # type: ignore[union-attr,arg-type]
    same = setup_of(Adapter, "seed=1", f"init_from={save_at(run, 8)}", root=tmp_path)
    assert not any("base.weight" in line for line in same.chosen)


def test_a_save_of_older_code_holds_everything_and_loads(tmp_path: Path) -> None:
    setup = setup_of(Adapter, "seed=1")
    setup.state.frozen = {}
    path = checkpoint.Checkpoints(tmp_path).save(setup.state, setup.save_extra())
    state = json.loads((path / "state.json").read_text())
    del state["frozen"]
    later = setup_of(Adapter, "seed=1", "base=1")
    saved = checkpoint.load(path)
    assert set(saved.weights) >= FROZEN
    checkpoint.Saved(path, 0, saved.weights, state).load_into(later.state.model)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(setup).values(), weights_of(later).values(), strict=True))


def test_a_frozen_part_that_init_from_brought_is_written(tmp_path: Path) -> None:
    """Or the run could not be resumed: its recipe does not make these weights."""
    first = train(Adapter, tmp_path, *KEEP_ALL, "trains_base=true")
    second = train(Adapter, tmp_path, *KEEP_ALL, f"init_from={save_at(first, 8)}")
    assert held(save_at(second, 4)) >= FROZEN
    base = load_file(save_at(first, 8) / "model.safetensors")["base.weight"]
    assert torch.equal(again(second, 4).state.model.base.weight, base)  # type: ignore[union-attr,arg-type]


def test_a_frozen_part_that_moves_is_written(tmp_path: Path) -> None:
    run = train(Adapter, tmp_path, *KEEP_ALL, "moves_base=true")
    assert held(save_at(run, 4)) >= {"base.weight"}
    assert "base.bias" not in held(save_at(run, 4))
    restored = again(run, 4, "moves_base=true").state.model.base.weight  # type: ignore[union-attr]
    assert not torch.equal(restored, Net(0).base.weight)  # type: ignore[arg-type]


def test_a_capture_is_as_small_and_replays(tmp_path: Path) -> None:
    run = train(Adapter, tmp_path, "bad_from=3")
    assert run.status == "diverged"
    [step] = capture.steps(run.path / "captures")
    assert held(checkpoint.Checkpoints(run.path / "captures").at(step)) & FROZEN == set()
    verdict = verdict_of(run, tmp_path)
    assert (verdict.step, verdict.origin) == (3, "MODEL MATH"), verdict.lines()


def test_one_bit_or_two_places_change_a_fingerprint() -> None:
    tensor = torch.randn(3, 5).bfloat16()
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    padded = torch.cat([torch.zeros(3, 1).bfloat16(), tensor], 1)
    assert fingerprint(padded[:, 1:]) == before  # by content, not by memory
    seen = {before, fingerprint(tensor.T), fingerprint(tensor.float()), fingerprint(tensor.reshape(5, 3))}
    seen |= {fingerprint(tensor.flip(0)), fingerprint(-tensor)}
    for bit in range(16):
        other = tensor.clone()
        other.view(torch.int16)[2, 4] ^= torch.tensor(1 << bit).to(torch.int16)
        seen.add(fingerprint(other))
    assert len(seen) == 6 + 16


def test_large_tensors_are_read_in_pieces_that_have_places() -> None:
    tensor = torch.zeros(2 * CHUNK * 8 + 3, dtype=torch.uint8)
    seen = set()
    for place in (0, CHUNK * 8 - 1, CHUNK * 8, 2 * CHUNK * 8, 2 * CHUNK * 8 + 2):
        tensor[place] = 1
        seen.add(fingerprint(tensor))
        tensor[place] = 0
    assert len(seen) == 5

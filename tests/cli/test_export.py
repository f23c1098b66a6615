"""If this fails, a model that was exported dreams something else than the one that was trained."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rung.api import load
from rung.engine.evaluate import eval_mode
from rung.random import Draw
from rung.recipes.world.dream import memory_of
from rung.recipes.world.memory import to_frame
from tests.contract.cases import SMALL
from tests.contract.cases import world as world_case

Rung = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def trained(rung: Rung, tmp_path: Path, world_data: Path) -> Path:
    words = {word.partition("=")[0]: word for word in (*SMALL, *world_case(world_data).words)}
    rung("train", "world", "preset=tiny", *words.values(), "optimizer.weight_decay=0.01")
    return tmp_path


@pytest.mark.slow
def test_onnxruntime_makes_the_same_frame(rung: Rung, trained: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    done = rung("export", "world/1", "--onnx", "--out", "walk.onnx", "--json")
    assert json.loads(done.stdout)["largest_difference"] < 2
    setup = load("world/1", runs=trained / "runs").setup
    stream = setup.streams["validation"]
    rows = np.arange(stream.num_rows)
    draw = Draw(0, -1, rows)
    batch = {k: torch.from_numpy(v) for k, v in stream.gather(rows, draw).items()}
    with eval_mode(setup.state.model):
        dreamer = setup.recipe._dreamer(setup.state.model)  # type: ignore[attr-defined]
        ours = to_frame(dreamer.make(memory_of(batch), batch["controls"][:, 0], draw, 0)).numpy()
    session = onnxruntime.InferenceSession(str(trained / "walk.onnx"), providers=["CPUExecutionProvider"])
    inputs = {name: batch[name].numpy() for name in batch if name.startswith("memory_")}
    inputs |= {
        "controls": batch["controls"][:, 0].numpy(),
        "noise": draw.noise("noise/0", (setup.state.model.generator.noise_size,)).numpy(),  # type: ignore[union-attr,operator]
    }
    assert {given.name for given in session.get_inputs()} == set(inputs)
    (theirs,) = session.run(["frame"], inputs)
    assert theirs.shape == ours.shape
    difference = np.abs(theirs.astype(int) - ours)
    assert difference.max() <= 1  # a value on the edge between two of the 256 levels may fall to either
    assert (difference > 0).mean() < 0.001
    assert ours.std() > 5  # not a grey field, which would agree with anything


def test_what_cannot_be_exported_is_said_in_a_sentence(rung: Rung, tmp_path: Path, world_data: Path) -> None:
    done = rung("export", "world/1", check=False)
    assert done.returncode == 2
    assert "[missing-option]" in done.stderr
    done = rung("export", "world/1", "--onnx", check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr

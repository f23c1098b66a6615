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
from rung.recipes.world.memory import push, to_frame
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
        rolled = dreamer.roll(memory_of(batch), batch["controls"][:, [0, 0]], draw)
        ours = [to_frame(made).numpy() for _, made in rolled]
    session = onnxruntime.InferenceSession(str(trained / "walk.onnx"), providers=["CPUExecutionProvider"])
    inputs = {name: batch[name].numpy() for name in batch if name.startswith("memory_")}
    inputs |= {
        "controls": batch["controls"][:, 0].numpy(),
        "keyframe": batch["memory_0"][:, -1].numpy(),
        "flow": np.zeros((len(rows), 2, 12, 16), np.float32),
        "known": np.ones((len(rows), 1, 12, 16), np.float32),
    }
    assert {given.name for given in session.get_inputs()} == {*inputs, "noise"}
    memory = memory_of(batch)
    for number in range(2):  # the second frame takes what the first one returned
        noise = draw.noise(f"noise/{number}", (setup.state.model.generator.noise_size,)).numpy()  # type: ignore[union-attr,operator]
        theirs, inputs["flow"], inputs["known"] = session.run(
            ["frame", "next_flow", "next_known"], inputs | {"noise": noise}
        )
        assert theirs.shape == ours[number].shape
        difference = np.abs(theirs.astype(int) - ours[number])
        assert difference.max() <= 1 + number  # a value on the edge between two of the 256 levels may fall to either
        assert (difference > 0).mean() < 0.001 + 0.01 * number
        memory = push(memory, torch.from_numpy(theirs))
        inputs |= {f"memory_{i}": level.numpy() for i, level in enumerate(memory)}
    assert ours[0].std() > 5  # not a grey field, which would agree with anything


def test_what_cannot_be_exported_is_said_in_a_sentence(rung: Rung, tmp_path: Path, world_data: Path) -> None:
    done = rung("export", "world/1", check=False)
    assert done.returncode == 2
    assert "[missing-option]" in done.stderr
    done = rung("export", "world/1", "--onnx", check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr

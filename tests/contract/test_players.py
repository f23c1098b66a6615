"""If this fails, `rung play` of a recipe says what no page understands, answers each time otherwise, or changes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rung.recipe import Plays
from rung.recipes import CATALOG
from rung.web.play import KINDS
from tests.contract.cases import CASES, Case
from tests.errors import raises_code

NOTES = [[0.0, 0.4, 60, 80], [0.5, 0.9, 64, 70], [1.0, 1.5, 67, 90], [1.5, 2.0, 72, 60]]


def loud(num_samples: int) -> bytes:
    time = np.arange(num_samples)
    return (8000 * np.sin(time / 7) + 4000 * np.sin(time / 31)).astype("<i2").tobytes()


ASKED: dict[str, dict[str, Any]] = {
    "text": {"prompt": [1, 2, 3], "num_tokens": 12, "alternatives": 3},
    "piano": {"notes": NOTES, "num_tokens": 40},
    "music": {"prompt": "a high note", "sound": loud(4000)},
    "speech": {"sound": loud(16000), "num_tokens": 8},
}


@pytest.fixture(params=[name for name in CASES if name.partition("_")[0] in CATALOG])
def case(request: pytest.FixtureRequest) -> Case:
    make, data = CASES[request.param]
    return make(request.getfixturevalue(data))


@torch.no_grad()
def test_it_answers_and_changes_nothing(case: Case, tmp_path: Path) -> None:
    setup = case.setup(root=tmp_path)
    assert isinstance(setup.recipe, Plays)
    model = setup.state.model.eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    player = setup.recipe.player(model)
    assert player.kind in KINDS
    about = player.about()
    assert json.loads(json.dumps(about)) == json.loads(msgspec.json.encode(about))  # plain data, however it is written
    if player.kind == "world":
        return  # tests/recipes/world/test_player.py walks in it
    asked = ASKED[player.kind]

    def answer(**more: Any) -> list[dict[str, Any]]:
        return list(player.answer(msgspec.convert({**asked, **more}, player.Request)))  # type: ignore[union-attr]

    state = torch.get_rng_state()
    pieces = answer()
    assert pieces
    assert msgspec.json.decode(msgspec.json.encode(pieces))
    assert answer() == pieces
    assert torch.equal(torch.get_rng_state(), state)
    if "seed" in player.Request.__struct_fields__:  # type: ignore[union-attr]
        assert any(answer(seed=seed) != pieces for seed in (1, 2, 3))
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not model.training
    if player.kind == "piano":
        (piece,) = pieces
        assert [pitch for _, _, pitch, _ in piece["given"]][-1] == 72  # as many of the last notes as fit
        assert piece["midi"].startswith(b"MThd")
        if about["tasks"]:
            with raises_code("prompt-empty"):
                answer(notes=[])
            task = about["tasks"][0]
            assert answer(task=task["name"], parameters=[one["usual"] for one in task["parameters"]])
            with raises_code("no-task"):
                answer(task="whistle")
        else:
            assert answer(notes=[])[0]["given"] == []
            with raises_code("not-supported"):
                answer(task="top_line")
    if player.kind == "music":
        assert pieces[0]["wav"].startswith(b"RIFF")
        assert "your clip" in pieces[0]["caption"]
    if player.kind == "speech":
        assert [piece["task"] for piece in pieces] == ["asr"]
        with raises_code("too-short"):
            answer(sound=loud(100))
        with raises_code("audio-silent"):
            answer(sound=bytes(64000))

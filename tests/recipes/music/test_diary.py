"""If this fails, the eight runs of the music diary can no longer be made, compared and written down."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rung import api
from rung.compare.reading import columns
from rung.robust import sigma
from rung.runs.query import open_run

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "examples" / "music-runs" / "README.md"
RUNS = sorted((ROOT / "examples" / "music-runs").glob("run-*.yaml"))
# The files' own sizes take half a minute to six minutes each; what differs between the runs is left alone.
SHORT = [
    "model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.n_kv_head=1", "model.text.n_layer=1",
    "data.context_size=40", "optimizer.max_iters=6", "lr.warmup_iters=2", "eval_interval=3", "sampling.seconds=0.2",
]  # fmt: skip
Rung = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def diary(music_data: Path, tmp_path: Path) -> Path:
    """The runs as the README trains them, each from the one before it."""
    told = [shlex.split(line) for line in README.read_text("utf-8").splitlines() if line.startswith("rung train")]
    assert [command[command.index("-c") + 1] for command in told] == [path.name for path in RUNS]
    for number, (path, command) in enumerate(zip(RUNS, told), start=1):
        parent = command[command.index("--parent") + 1] if number > 1 else None
        assert parent == (f"dia_010/{number - 1}" if number > 1 else None)
        words = [f"dataset.base_dataset_name={music_data}", *SHORT]
        run = api.train(
            "music", words, files=[path], parent=parent, why=command[command.index("--why") + 1],
            experiment="dia_010", runs=tmp_path / "runs", check=False, display=False,
        )  # fmt: skip
        assert run.status == "finished"
    return tmp_path / "runs"


def test_the_page_of_the_diary(diary: Path, rung: Rung) -> None:
    assert len(RUNS) == 8
    changes = {
        (1, 2): {"model.init"}, (2, 3): {"loss_masking"}, (3, 4): {"delay.pattern"}, (4, 5): {"model.attention_scale"},
        (5, 6): {"model.init"}, (6, 7): {"optimizer.gradient_accumulation_steps"},
        (7, 8): {"loss_masking", "model.text_lr_scale", "data.random_crop"},
    }  # fmt: skip
    for (a, b), expected in changes.items():
        found = json.loads(rung("diff", f"dia_010/{a}", f"dia_010/{b}", "--json").stdout)
        named = {one["name"] for one in found["differences"]}
        assert expected <= named, (a, b, named)
        assert len(named & {key for keys in changes.values() for key in keys}) == len(expected)
    page = rung("report", "dia_010").stdout
    assert (diary / "dia_010" / "report.md").is_file(), page
    text = (diary / "dia_010" / "report.md").read_text("utf-8")
    assert all(f"dia_010/{number}" in text for number in range(1, 9))
    assert "is the init to blame?" in text  # why
    assert "`model.init` `depth_scaled` → `xavier` since `dia_010/1`" in text
    rung("report", "dia_010/1")
    page = (diary / "dia_010" / "1" / "report.md").read_text("utf-8")
    drawn = (diary / "dia_010" / "1" / "perplexity.svg").read_text("utf-8")
    assert all(f">{book}<" in drawn for book in ("left 0", "right 2"))  # a line for each codebook
    assert (diary / "dia_010" / "1" / "entropy.svg").is_file()
    # The output entropy of each of its six steps; the clipped ones are those that the record has.
    rows = columns(open_run("dia_010/1", diary), ["entropy", "norm", "norm_clipped"])
    entropy, norms, clipped = (list(one.values) for one in rows.values())
    assert (len(entropy), min(entropy) > 0) == (6, True)
    rough = sigma(np.diff(entropy).tolist())
    assert f"**roughness of the entropy**: {rough:.6g} nats" in page
    num = sum(after < 0.999 * norm for norm, after in zip(norms, clipped))
    assert f"**clipped**: {num} of 6 applied steps" in page
    # Another mask is another loss: no verdict.
    judged = json.loads(rung("ab", "--judge", "dia_010/2", "--", "dia_010/3", "--json", check=False).stdout)
    assert judged["word"] == "INCOMPARABLE"
    words = ("--metric", "validation/codes_only", "--json")
    judged = json.loads(rung("ab", "--judge", "dia_010/2", "--", "dia_010/3", *words, check=False).stdout)
    assert (judged["word"], judged["factor"]) == ("UNDECIDED", "loss_masking all -> codes")  # one run is no verdict


@pytest.mark.slow
def test_three_pairs_of_seeds_give_a_verdict(music_data: Path, rung: Rung, tmp_path: Path) -> None:
    words = [f"dataset.base_dataset_name={music_data}", *SHORT]
    rung("train", "music", "-c", RUNS[0], *words, "--experiment", "dia_010", "--no-check")
    judged = json.loads(rung("ab", "dia_010/1", "model.init=xavier", "--seeds", 3, "--json", check=False).stdout)
    assert judged["word"] in ("BETTER", "WORSE", "EQUIVALENT", "UNDECIDED")
    assert judged["num_pairs"] == 3

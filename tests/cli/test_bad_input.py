"""If this fails, a user's mistake ends in a traceback, in silence or in something half done, not in a sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rung.cli import main
from rung.engine.parallel import World, share
from rung.errors import ConfigError
from rung.runs.query import open_run

WORDS = (
    "model.n_layer=1 model.n_head=1 model.n_embd=16 data.context_size=32 data.batch_size=4 optimizer.max_iters=4 "
    "lr.warmup_iters=1 checkpoint.every=2 sampling.num_tokens=4 system.threads=1 system.device=cpu"
)
SMALL = WORDS.split()

Refused = Callable[..., str]


@pytest.fixture(scope="module")
def place(piano_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, piano/1, on data of its own."""
    folder = tmp_path_factory.mktemp("place")
    shutil.copytree(piano_data, folder / "data" / "piano")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["rung", "train", "piano", *SMALL])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 0
    return folder


@pytest.fixture
def refused(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Calls rung as the command line does, expects exit code 2 and one sentence, and returns it."""
    monkeypatch.chdir(place)
    capsys.readouterr()

    def call(*words: object) -> str:
        before = sorted(path for path in place.rglob("*") if "__pycache__" not in path.parts)
        monkeypatch.setattr(sys, "argv", ["rung", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr()
        assert end.value.code == 2, shown.out + shown.err
        lines = [line for line in shown.err.splitlines() if not line.endswith(" ...")]  # progress is no complaint
        assert len(lines) == 1, shown.err
        assert re.fullmatch(r"rung: .* \[[a-z0-9-]+\]", lines[0])
        assert sorted(path for path in place.rglob("*") if "__pycache__" not in path.parts) == before
        return lines[0]

    return call


COMMAND_LINE = [
    (["trian"], "[no-verb]"),
    (["train"], "[missing-recipe]"),
    (["train", "paino"], " piano?"),
    (["train", "piano", "--form", "piano/1"], "[usage]"),
    (["train", "piano", "--runs"], "[usage]"),
    (["train", "nowhere.recipe:Mine"], "nowhere.recipe:Mine"),
    (["train", "rung.recipes:Mine"], " Mine "),
    (["train", "rung.errors:UserError"], " UserError "),
    (["train", "piano", "--experiment", "a/b"], "'a/b'"),
    (["train", "--parent", "piano/9", "seed=1"], "piano/9"),
    (["resume"], "[usage]"),
    (["resume", "pinao"], " piano?"),
    (["resume", "piano/1", "--at", "two"], "[usage]"),
    (["show", "piano/7"], "piano/7"),
    (["eval", "text/1"], "text/1"),
    (["eval", "piano/1", "--at", "99"], " 2, 4"),
    (["sample", "data/piano"], "run.json"),
    (["config"], "[missing-recipe]"),
    (["data", "violin"], "violin"),
    (["data", "show", "violin"], "data/violin"),
    (["data", "verify", "violin"], "data/violin"),
]


@pytest.mark.parametrize(("words", "value"), COMMAND_LINE, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_words_that_mean_nothing(refused: Refused, words: list[str], value: str) -> None:
    assert value in refused(*words)


CONFIG = [
    ("lr.learning_rat=1e-3", " lr.learning_rate?"),
    ("model.layers=3", "model.layers "),
    ("data.batch_size=many", "data.batch_size=many "),
    ("data.batch_size=2.5", "data.batch_size=2.5 "),
    ("data.batch_size=0", "data.batch_size=0 "),
    ("optimizer.beta1=1.5", " 0.999999"),
    ("lr.learning_rate=.nan", "lr.learning_rate=nan "),
    ("optimizer.name=sgd", " adamw, muon"),
    ("optimizer.max_iters=3 parsecs", "'parsecs'"),
    ("system.device=gpu", "system.device=gpu "),
    ("system.device=cuda:99", "system.device=cuda:99"),
    ("model=big", "model "),
    ("data.batch_size", " key=value"),
    ("seed=[1", "seed=[1"),
    ("preset=huge", "preset=huge "),
    ("model.n_embd=50", " 52 "),
    ("lr.min_lr=1", "lr.min_lr=1 "),
    ("lr.warmup_iters=5000", "lr.warmup_iters=5000 "),
    ("model.context_size=64", " data.context_size"),
    ("optimizer.max_iters=10 min", "10 min"),
    ("eval_only=true", "init_from=scratch_next_token"),
    ("init_from=piano/9", "piano/9"),
    ("init_from=no/such/folder", "no/such/folder"),
    ("dataset.base_dataset_name=violin", "`rung data piano --from"),
    ("dataset.base_dataset_name=runs/piano", "runs/piano"),
    ("dataset.pause_detection_threshold=1", "dataset.pause_detection_threshold=1"),
]


@pytest.mark.parametrize(("word", "value"), CONFIG)
def test_config_mistakes(refused: Refused, word: str, value: str) -> None:
    assert value in refused("train", "piano", word)


def test_every_mistake_is_told_at_once(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["rung", "train", "piano", "data.batch_size=0", "lr.rate=1", "optimizer.name=sgd"])
    with pytest.raises(SystemExit) as end:
        main()
    err = capsys.readouterr().err
    assert end.value.code == 2
    assert [word for word in ("data.batch_size", "lr.rate", "optimizer.name") if word not in err] == []
    assert "Traceback" not in err


FILES = [
    ("data: [1, 2\n", "mine.yaml"),
    ("- a\n- b\n", "mine.yaml"),
    ("data:\n  batchsize: 3\n", "data.batchsize "),
    ("lr: 3\n", "lr "),
    (None, "mine.yaml"),
]


@pytest.mark.parametrize(("text", "value"), FILES)
def test_config_files(refused: Refused, text: str | None, value: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    assert value in refused("train", "piano", "-c", file)


def test_a_config_file_that_is_a_folder(refused: Refused, tmp_path: Path) -> None:
    assert str(tmp_path) in refused("train", "piano", "-c", tmp_path)


def test_folders_without_music(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no music")
    assert "nowhere" in refused("data", "piano", "--from", tmp_path / "nowhere", "--name", "new")
    assert "a.txt" in refused("data", "piano", "--from", tmp_path / "texts/a.txt", "--name", "new")
    for name in ("empty", "texts"):
        assert "*.mid, *.midi" in refused("data", "piano", "--from", tmp_path / name, "--name", "new")
    assert "--replace" in refused("data", "piano", "--from", tmp_path / "empty")


def test_nothing_but_unreadable_files(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "a.mid").write_bytes(b"MThd and then nothing of use")
    assert "a.mid" in refused("data", "piano", "--from", tmp_path, "--name", "new")


def test_unreadable_files_among_good_ones_are_named(
    rung: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    from rung.recipes.piano import midi, notes

    folder = tmp_path / "tunes"
    folder.mkdir()
    for number in range(4):
        starts = [0.1 * number + 0.3 * i for i in range(20)]
        tune = notes.make(starts, [s + 0.2 for s in starts], [60 + (number * i) % 12 for i in range(20)], [64] * 20)
        (folder / f"good{number}.mid").write_bytes(midi.write_midi(tune))
    (folder / "torn.mid").write_bytes((folder / "good0.mid").read_bytes()[:40])
    (folder / "text.mid").write_text("this is no MIDI file")
    (folder / "empty.mid").touch()
    done = rung("data", "piano", "--from", folder, "--name", "mine")
    assert "Traceback" not in done.stderr
    assert re.search(r"quarantined 3 files \(.*empty.mid.*text.mid.*torn.mid", done.stdout), done.stdout
    shown = json.loads(rung("data", "show", "mine", "--json").stdout)
    named = {entry["file"]: entry["reason"] for entry in shown["info"]["quarantined"]}
    assert set(named) == {"torn.mid", "text.mid", "empty.mid"}
    assert all(named.values()), "each has a reason"


def test_resume_of_a_finished_run(refused: Refused) -> None:
    sentence = refused("resume", "piano/1")
    assert "optimizer.max_iters=4" in sentence
    assert "rung train --parent piano/1 init_from=piano/1" in sentence


RESUME = [
    ("lr.learning_rate=1", "lr.learning_rate "),
    ("optimizer.max_iters=9", "optimizer.max_iters "),
    ("preset=small", "preset "),
    ("data.batch_size=8", " 8 rows "),
    ("checkpoint.kep=3", " checkpoint.keep?"),
]


@pytest.mark.parametrize(("word", "value"), RESUME)
def test_resume_with_a_key_that_changes_what_is_learned(refused: Refused, word: str, value: str) -> None:
    assert value in refused("resume", "piano/1", word)


def test_resume_at_a_step_without_save(refused: Refused) -> None:
    assert " 2, 4" in refused("resume", "piano/1", "--at", 3)


def test_resume_of_a_running_run(
    rung: Callable[..., subprocess.CompletedProcess[str]], piano_data: Path, tmp_path: Path
) -> None:
    words = ["train", "piano", f"dataset.base_dataset_name={piano_data}", *SMALL]
    words = [word for word in words if not word.startswith(("optimizer.max_iters", "checkpoint.every"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "rung", *words, "optimizer.max_iters=1M", "checkpoint.every=10"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True,
    ) as training:  # fmt: skip
        assert training.stdout is not None
        try:
            assert any(line.startswith("step 10/") for line in training.stdout), "it ended before its first save"
            done = rung("resume", "piano/1", check=False)
            assert open_run("piano/1", tmp_path / "runs").status == "running"
        finally:
            training.send_signal(signal.SIGTERM)
            training.communicate()  # it may be waiting for a reader
    assert done.returncode == 2
    assert re.fullmatch(rf"rung: .*process {training.pid} on .*\n", done.stderr)
    assert training.returncode == 128 + signal.SIGTERM
    run = open_run("piano/1", tmp_path / "runs")
    assert run.status == "stopped"
    assert len(run.document["segments"]) == 1, "the refused resume left nothing behind"


@pytest.mark.parametrize(
    ("rows", "accumulation", "ranks", "better"), [(12, 5, 8, (16, 4)), (1, 1, 2, (2, 1)), (3, 3, 2, (5, 2))]
)
def test_a_batch_that_ranks_cannot_share(rows: int, accumulation: int, ranks: int, better: tuple[int, int]) -> None:
    world = World(0, ranks, torch.device("cpu"))
    with pytest.raises(ConfigError) as caught:
        share(rows, accumulation, world)
    message = str(caught.value)
    assert f"= {rows * accumulation} rows " in message
    found = re.search(r"batch_size=(\d+), gradient_accumulation_steps=(\d+)\.$", message)
    assert found, message
    assert (int(found[1]), int(found[2])) == better
    share(*better, world)  # what it advises works


@pytest.mark.parametrize(
    "words", [["train", "piano", "lr.learning_rat=1"], ["show", "piano/1"], ["data", "show", "violin"]]
)
def test_from_outside(rung: Callable[..., subprocess.CompletedProcess[str]], words: list[str]) -> None:
    done = rung(*words, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("rung: ")


def test_an_empty_source_is_not_this_folder(refused: Refused) -> None:
    assert "[missing-option]" in refused("data", "piano", "--from", "", "--name", "new")

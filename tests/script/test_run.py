"""If this fails, a loop of one's own is recorded otherwise than it ran, or its logging ends its training."""

from __future__ import annotations

import argparse
import dataclasses
import errno
import io
import json
import os
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import rung
import rung.wandb as wandb
from rung.errors import UserError
from rung.runs.query import Run, open_run
from rung.script import never_raise
from rung.script.run import OwnRun
from rung.secrets import command_without_secrets
from tests.errors import raises_code

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., OwnRun]


def ended(run: OwnRun, status: str | None = None) -> Run:
    run.finish(status)
    assert run.path is not None
    return open_run(str(run.path), Path("runs"))


def test_rows_evals_and_the_best_of_them_read_as_in_any_run(start: Start) -> None:
    run = start(config={"lr": 0.1}, why="to see", tags=["a"], notes="not taken", name="title", seed=5)
    for step in range(30):
        run.log({"loss": 3.0 - step / 10, "targets": 8})
        if step % 10 == 9:
            run.log({"val/loss": 2.0 + (step - 19) ** 2, "val/acc": 0.5})
    found = ended(run)
    assert (found.status, found.step, found.document["seed"], found.document["why"]) == ("finished", 30, 5, "to see")
    assert found.document["tags"] == ["a", "title"]
    assert found.document["recipe"] == "own loop"
    assert found.best == {"step": 20, "set": "val", "loss": 2.0}
    assert [(e["step"], e["set"], e["acc"]) for e in found.evals()] == [
        (10, "val", 0.5),
        (20, "val", 0.5),
        (30, "val", 0.5),
    ]
    columns = found.metrics(["loss", "eval/val/loss"])
    rows = [(s, v) for s, v in zip(columns["step"], columns["loss"]) if v is not None]
    assert rows == [(step, 3.0 - step / 10) for step in range(30)]
    assert [s for s, v in zip(columns["step"], columns["eval/val/loss"]) if v is not None] == [10, 20, 30]
    assert found.document["totals"]["targets"] == 240


def test_steps_of_the_script_are_kept_and_one_that_goes_back_is_told(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start()
    run.log({"loss": 1.0}, step=100)
    run.log({"lr": 0.1}, step=100)
    run.log({"acc": 0.1})  # without a number: where the run stands
    run.log({"loss": 2.0}, step=3)
    run.log({"val_loss": 5.0}, step=3)  # by epochs, say
    run.log({"loss": 0.5, "step": 110})
    found = ended(run)
    columns = found.metrics(["loss", "lr", "acc"])
    assert columns["step"] == [100, 100, 100, 100, 110]
    assert columns["loss"] == [1.0, None, None, None, 0.5]
    assert [(e["step"], e["loss"]) for e in found.evals()] == [(100, 5.0)]
    assert capsys.readouterr().err.count("step 3 comes after step 100") == 1
    assert next(found.events("left_out"))["rows"] == 1


@pytest.mark.parametrize(
    "step", [-1, 1.5, "x", float("nan"), float("inf"), None, [], 2**70, np.int64(4), torch.tensor(4)]
)
def test_no_step_raises(start: Start, step: Any) -> None:
    run = start()
    run.log({"loss": 1.0}, step=step)
    assert len(ended(run).metrics(["loss"])["loss"]) == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.text(max_size=8), st.one_of(st.floats(), st.text(max_size=4), st.none()), max_size=4),
            st.one_of(st.none(), st.integers(-5, 60)),
        ),
        max_size=12,
    )
)
def test_whatever_is_logged_steps_never_go_back(start: Start, logs: list[tuple[dict[str, Any], int | None]]) -> None:
    run = start()
    for values, step in logs:
        run.log(values, step=step)
    steps = ended(run).metrics()["step"]
    assert steps == sorted(steps)


def test_one_names_values_for_the_next_row(start: Start) -> None:
    run = start()
    run.log({"a": 1.0}, commit=False)
    run.log({"b": 2.0})
    columns = ended(run).metrics(["a", "b"])
    assert (columns["a"], columns["b"]) == ([1.0], [2.0])


@dataclasses.dataclass
class Inner:
    n_layer: int = 2


@dataclasses.dataclass
class Settings:
    lr: float = 0.1
    model: Inner = dataclasses.field(default_factory=Inner)


@pytest.mark.parametrize(
    "config",
    [
        {"lr": 0.1, "model": {"n_layer": 2}},
        Settings(),
        argparse.Namespace(lr=0.1, model={"n_layer": 2}),
        OmegaConf.create({"lr": 0.1, "model": {"n_layer": 2}}),
    ],
    ids=["dict", "dataclass", "argparse", "OmegaConf"],
)
def test_a_config_of_any_kind(start: Start, config: Any) -> None:
    run = start(config=config)
    assert (run.config.lr, run.config["lr"], run.config.model.n_layer, run.config["model"]["n_layer"]) == (
        0.1,
        0.1,
        2,
        2,
    )
    with pytest.raises(AttributeError, match="has no lrr"):
        _ = run.config.lrr
    assert ended(run).config() == {"lr": 0.1, "model": {"n_layer": 2}}


def test_a_config_that_changes_says_when(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--lr=0.2", "--batch-size", "4"])
    run = start(config={"lr": 0.2, "batch_size": 4, "model": {"width": 8}})
    run.config.update({"early": 1}, allow_val_change=True)
    run.log({"loss": 1.0})
    run.config.model.width = 16
    run.config["late"] = 2
    found = ended(run)
    assert found.config() == {"lr": 0.2, "batch_size": 4, "model": {"width": 16}, "early": 1, "late": 2}
    assert found.sources() == {
        "lr": "command line", "batch_size": "command line", "model.width": "changed at step 1", "early": "script",
        "late": "changed at step 1",
    }  # fmt: skip
    assert [event["values"] for event in found.events("config")] == [{"model.width": 16}, {"late": 2}]


def test_secrets_are_not_written(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train.py", "--hub_token=hf_abc", "--api-key", "sk-abc", "--pad_token=<pad>"]
    monkeypatch.setattr("sys.argv", words)
    run = start(config={"hub_token": "hf_abc", "nested": {"API_KEY": "sk-abc"}, "pad_token": "<pad>", "max_tokens": 4})
    assert run.config.hub_token == "hf_abc"  # the script still has it
    run.config.update({"wandb_api_key": "sk-abc", "data": "https://me:sk-abc@host/x", "openai_key": "sk-abc"})
    run.config.update({"secret_access_key": "sk-abc", "urls": ["s3://a:sk-abc@b"]})
    assert run.path is not None
    for path in run.path.rglob("*"):
        if path.is_file():
            assert b"_abc" not in path.read_bytes(), path
            assert b"sk-abc" not in path.read_bytes(), path
    assert ended(run).config()["pad_token"] == "<pad>"
    assert command_without_secrets(["rung", "hub_token=S", "x=http://a:b@c/d"]) == [
        "rung",
        "hub_token=(hidden)",
        "x=http://a:(hidden)@c/d",
    ]
    assert command_without_secrets(words) == [
        "train.py",
        "--hub_token=(hidden)",
        "--api-key",
        "(hidden)",
        "--pad_token=<pad>",
    ]


def test_definitions_say_what_counts_and_which_way(start: Start) -> None:
    from rung.compare.reading import is_lower_better

    run = start()
    run.define_metric("val/loss", better="lower", mask="padding", ignored_ids=[0], eval_set="held out")
    run.define_metric("val/acc", goal="maximize")
    run.define_metric("reward", better="sideways")
    found = ended(run)
    assert found.definitions()["eval/val"] == {"mask": "padding", "ignored_ids": [0], "eval set": "held out"}
    assert is_lower_better(found, "val/loss") is True
    assert is_lower_better(found, "val/acc") is False
    assert is_lower_better(found, "reward") is None


def test_samples_of_all_kinds(start: Start) -> None:
    from PIL import Image

    run = start()
    Path("a file.txt").write_text("hello")
    run.log({"loss": 1.0}, step=7)
    run.sample("a file.txt")
    run.sample("../../escape/né\x1b[31m", "text <b>\n", caption="# not a\nheading")
    run.sample("picture", Image.new("RGB", (2, 2)))
    run.sample("bytes.mid", b"MThd", step=3)
    run.sample("sound", torch.sin(torch.arange(800) / 10), rate=8000)
    run.sample("stereo", np.zeros((2, 400)), rate=8000)
    run.sample("nothing", object())
    run.sample("no such file")
    found = ended(run)
    files = {path.name: path for path in found.samples()}
    assert len(files) == 6
    assert files["a file.txt"].read_text() == "hello"
    assert Image.open(files["picture.png"]).size == (2, 2)
    with wave.open(io.BytesIO(files["sound.wav"].read_bytes())) as sound:
        assert (sound.getnframes(), sound.getframerate(), sound.getnchannels()) == (800, 8000, 1)
    with wave.open(io.BytesIO(files["stereo.wav"].read_bytes())) as sound:
        assert (sound.getnframes(), sound.getnchannels()) == (400, 2)
    assert all(path.resolve().is_relative_to(found.path) for path in files.values())
    assert [e["step"] for e in found.events("sample")] == [7, 7, 7, 3, 7, 7]


@pytest.mark.parametrize("most", [100_000, 5])
def test_what_a_full_disk_has_no_room_for_is_written_when_it_has(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], most: int
) -> None:
    run, write, is_full = start(), os.write, [True]

    def refuse(fd: int, data: Any) -> int:
        if is_full[0] and fd > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(never_raise, "MOST_KEPT", most)
    run.log({"loss": 0.0})
    monkeypatch.setattr(os, "write", refuse)
    for number in range(1, 8):
        run.log({"loss": float(number)})
    run.config.x = 1
    run.note("late")
    is_full[0] = False
    run.log({"loss": 8.0})
    found = ended(run)
    logged = [v for v in found.metrics(["loss"])["loss"] if v is not None]
    is_whole = most > 10
    assert logged == ([float(n) for n in range(9)] if is_whole else [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 8.0])
    [event] = found.events("disk_was_full")
    assert bool(event["num_lost"]) is not is_whole
    assert [one["text"] for one in found.events("note")] == (["late"] if is_whole else [])
    assert found.status == "finished"
    said = capsys.readouterr().err
    assert said.count("no space left") == 1
    assert said.count("there is room again") == 1


def test_what_never_reached_the_disk_is_said(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, write = start(), os.write

    def refuse(fd: int, data: Any) -> int:
        if fd > 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        for number in range(5):
            run.log({"loss": float(number)})
        run.finish()
    assert "the disk stayed full" in capsys.readouterr().err


def test_module_level_names_act_on_the_current_run(start: Start) -> None:
    with raises_code("no-run"):
        rung.log({"loss": 1.0})
    assert wandb.run is None
    with pytest.raises(AttributeError, match=r"wandb\.init"):
        _ = wandb.config
    run = start(config={"lr": 0.5})
    assert wandb.run is run
    assert wandb.config.lr == 0.5
    rung.log({"loss": 1.0})
    assert wandb.summary["loss"] == 1.0
    rung.finish()
    assert run.status == "finished"
    assert wandb.run is None


def test_a_second_run_ends_the_first(start: Start) -> None:
    first, second = start(), start()
    assert (first.status, second.status, second.id) == ("finished", "running", "mine/2")
    third = start(reinit="create_new")
    assert (second.status, third.status) == ("running", "running")
    second.finish()


def test_other_ranks_are_silent(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "1")
    run = start(config={"lr": 1})
    model = torch.nn.Linear(1, 1)
    run.watch(model)
    run.log({"loss": 1.0, "val/loss": 2.0})
    run.sample("x", "y")
    run.note("z")
    run.config.lr = 2
    run.define_metric("val/loss", better="lower")
    run.finish()
    assert (run.config.lr, run.path) == (2, None)
    assert start(mode="disabled").path is None
    assert list(tmp_path.iterdir()) == []


def test_unknown_words_are_told_and_mistakes_at_the_start_raise(
    start: Start, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    start(project="theirs", entity="me", parent="gone/7", save_code=True)
    said = capsys.readouterr().err
    assert "entity=, save_code=" in said
    assert "parent='gone/7'" in said
    with pytest.raises(UserError, match="cannot name an experiment"):
        rung.init("no/name")
    with raises_code("bad-config"):
        rung.init("mine", config=7)
    with raises_code("no-mirror"):
        rung.init("fresh", mirror="nonsense")
    assert not (tmp_path / "runs" / "fresh").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        rung.init("mine", runs=tmp_path / "file")


def test_data_is_known_to_the_byte(start: Start) -> None:
    run = start()
    Path("corpus.txt").write_text("abc")
    run.data("train", "corpus.txt", tokenizer="letters")
    run.data("other", Path("corpus.txt"))
    run.data("array", np.arange(4))
    run.data("tensor", torch.arange(4))
    run.data("wrong", object())
    data = ended(run).data()
    assert data["train"]["about"] == {"tokenizer": "letters"}
    assert data["train"]["fingerprint"] == data["other"]["fingerprint"]
    assert data["array"] == data["tensor"] | {"rows": 4}
    assert "wrong" not in data


def test_an_eval_told_in_two_calls_is_one(start: Start) -> None:
    run = start()
    run.log({"loss": 1.0})
    run.log({"val/loss": 2.0, "val/time": 3.0})
    run.log({"val/acc": 0.5})
    run.log({"eval_runtime": 7.0})  # no row of training either
    run.log({"loss": 0.5})
    found = ended(run)
    assert found.evals() == [{"step": 1, "set": "val", "loss": 2.0, "acc": 0.5}]
    columns = found.metrics(["loss", "val/time", "eval_runtime"])
    assert [(s, v) for s, v in zip(columns["step"], columns["loss"]) if v is not None] == [(0, 1.0), (1, 0.5)]
    assert [v for v in columns["val/time"] + columns["eval_runtime"] if v is not None] == [3.0, 7.0]


def test_only_evals_have_a_last_step_too(start: Start) -> None:
    run = start()
    run.log({"val/loss": 1.0}, step=30)
    assert ended(run).step == 30


def test_a_step_between_two_whole_numbers_is_told(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    run = start()
    epochs: list[Any] = [0.1, 0.2]
    for epoch in epochs:
        run.log({"loss": epoch}, step=epoch)
    assert ended(run).metrics(["loss"])["step"] == [0, 1]
    assert capsys.readouterr().err.count("is not a whole number") == 1


def test_nothing_that_is_passed_raises(start: Start) -> None:
    run = start()
    itself: dict[str, Any] = {}
    itself["itself"] = itself
    for value in (torch.tensor(1j), torch.empty(1, device="meta"), itself, object()):
        run.log({"odd": value})
    run.log()  # type: ignore[call-arg]
    run.log({"\udcff": 1.0})
    run.targets("many")  # type: ignore[arg-type]
    run.define_metric("x", better=["lower"])  # type: ignore[arg-type]
    run.watch(torch.nn.Linear(1, 1), every="all")  # type: ignore[arg-type]
    run.watch(torch.nn.LazyLinear(1))
    run.summary["itself"] = itself
    found = ended(run)
    assert found.status == "finished"
    assert "\\udcff" in found.names()


def test_a_device_that_failed_does_not_hide_how_the_run_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from rung.script.step_axis import AsyncScalars

    def fail(self: AsyncScalars, wait: bool = False) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    run = start()
    run.log({"loss": 1.0})
    monkeypatch.setattr(AsyncScalars, "read", fail)
    run.finish("crashed", "RuntimeError: illegal memory access")
    assert run.path is not None
    found = open_run(str(run.path), Path("runs"))
    assert (found.status, found.document["reason"]) == ("crashed", "RuntimeError: illegal memory access")


def test_a_run_that_ended_stays_ended(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    run = start()
    run.finish()
    for _ in range(2):
        run.log({"loss": 1.0})
    assert (run.status, wandb.run) == ("finished", None)
    assert capsys.readouterr().err.count("is not kept") == 1


def test_names_cannot_command_the_terminal(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    run = start()
    run.log({"eval/\x1b[31mred/loss": 1.0})
    run.finish()
    assert "\x1b" not in capsys.readouterr().err


def test_a_script_for_wandb_runs_to_its_end(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    wandb.login(key="x")
    start("theirs", config={"lr": 0.1}, settings=wandb.Settings(silent=True))
    wandb.config.update({"width": 8})
    wandb.run.name = "a title"
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=wandb.config.lr)
    wandb.watch(model, torch.nn.MSELoss(), log="all", log_freq=10)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        wandb.log({"loss": 1.0, "film": wandb.Video(np.zeros((2, 2)), caption="x"), "plot": wandb.plot.bar([1])})
    artifact = wandb.Artifact("model", type="model")
    with artifact.new_file("x"):
        pass
    wandb.log_artifact(artifact).wait()
    wandb.run.log_code(".")
    assert isinstance(wandb.Video(1), wandb.Video)
    assert not isinstance(1.0, wandb.Video)
    (Path(wandb.run.dir) / "model.pt").write_bytes(b"weights")
    run = wandb.run
    wandb.finish(exit_code=1, quiet=True)
    found = open_run(str(run.path), Path("runs"))
    assert (found.status, found.config()["width"], found.document["tags"]) == ("crashed", 8, ["a title"])
    assert found.metrics(["norm"])["norm"] == pytest.approx([2**0.5] * 2)
    said = capsys.readouterr().err
    assert said.count("rung has no Video") == said.count("rung has no Artifact") == said.count("'film' is") == 1
    with pytest.raises(AttributeError, match="agent"):  # would decide what is run
        _ = wandb.agent


def test_pictures_sound_tables_and_histograms_are_samples_of_their_step(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    run = start("theirs")
    wandb.log({"loss": 2.0})
    red = np.zeros((3, 4, 3))
    red[..., 0] = 1.0
    table = wandb.Table(columns=["digit", "right"], data=[[7, np.float32(0.5)]])
    table.add_data("<b>", None)
    wandb.log({
        "loss": 1.0,
        "eval/red": wandb.Image(red, caption="all red"),
        "pair": [wandb.Image(torch.zeros(1, 2, 5)), wandb.Image(np.full((2, 2), 200))],
        "beep": wandb.Audio(np.zeros(800), sample_rate=8000),
        "table": table,
        "weights": wandb.Histogram([0.0, 0.1, 1.0, float("nan")], num_bins=2),
        "counted": wandb.Histogram(np_histogram=np.histogram([1, 2, 3], bins=3)),
        "bad": wandb.Image(np.zeros((2, 2, 7))),
    })  # fmt: skip
    wandb.log({"alone": wandb.Image(red)}, step=9)
    path = run.path
    wandb.finish(quiet=True)
    found = open_run(str(path), Path("runs"))
    files = {one.name: one for one in found.samples()}
    assert {int(one.parent.name) for name, one in files.items() if name != "alone.png"} == {1}
    assert int(files["alone.png"].parent.name) == 9
    with Image.open(files["eval_red.png"]) as picture:
        assert (picture.size, picture.getpixel((0, 0))) == ((4, 3), (255, 0, 0))
    with Image.open(files["pair_0.png"]) as one, Image.open(files["pair_1.png"]) as other:
        assert (one.size, other.getpixel((0, 0))) == ((5, 2), 200)
    with wave.open(str(files["beep.wav"])) as sound:
        assert (sound.getframerate(), sound.getnframes()) == (8000, 800)
    kept = json.loads(files["table.table.json"].read_text())
    assert kept == {"columns": ["digit", "right"], "rows": [[7, 0.5], ["<b>", None]], "num_rows": 2}
    assert json.loads(files["weights.histogram.json"].read_text()) == {"edges": [0, 0.5, 1], "counts": [2, 1]}
    assert json.loads(files["counted.histogram.json"].read_text())["counts"] == [1, 1, 1]
    captions = {event["path"].rpartition("/")[2]: event["caption"] for event in found.events("sample")}
    assert captions["eval_red.png"] == "all red"
    assert found.metrics(["loss"]) == {"step": [0, 1], "loss": [2.0, 1.0]}
    assert capsys.readouterr().err.count("'bad' was not kept") == 1


ENDS = {
    "fine": ("", 0, "finished", None),
    "raises": ("raise ValueError('broken')", 1, "crashed", "ValueError: broken"),
    "interrupted": ("raise KeyboardInterrupt", -2, "stopped", "interrupted"),
    "with": ("\nwith run:\n    raise ValueError('inside')", 1, "crashed", "ValueError: inside"),
    "caught": ("\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    pass", 0, "finished", None),
    "exit": ("\nwith run:\n    raise SystemExit(3)", 3, "crashed", "exit 3"),
    "exits": ("sys.exit(3)", 3, "crashed", "exit 3"),
    "quits": ("exit('no data')", 1, "crashed", "exit no data"),
    "exits well": ("sys.exit(0)", 0, "finished", None),
    "exit caught": ("\ntry:\n    sys.exit(2)\nexcept SystemExit:\n    run.note('went on')", 0, "finished", None),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "vanished", None),
    "forked": ("import os\npid = os.fork()\nif pid == 0: raise SystemExit\nos.waitpid(pid, 0)", 0, "finished", None),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_the_end_of_a_script_is_the_end_of_its_run(how: str, tmp_path: Path) -> None:
    code, exit_code, status, reason = ENDS[how]
    light = "assert not {'torch', 'numpy'} & set(sys.modules)"
    script = f"import rung, sys\nrun = rung.init('mine')\nrun.log({{'loss': 1.0}})\n{code}\n{light}"
    (tmp_path / "train.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode in (exit_code, 128 - exit_code), done.stderr
    found = open_run("mine", tmp_path / "runs")
    assert (found.status, found.document.get("reason")) == (status, reason)
    assert found.metrics(["loss"])["loss"] == [1.0]
    assert json.loads((found.path / "run.json").read_text())["code"]["kind"] == "tar"
    if status == "crashed":  # the line of the script, whatever raised below it
        failure = found.document["failure"]
        line = next(n for n, text in enumerate(script.splitlines(), 1) if failure["code"] == text.strip())
        assert (failure["file"], failure["line"], failure["function"]) == ("train.py", line, "<module>")
        assert next(found.events("crash"))["error"] == reason

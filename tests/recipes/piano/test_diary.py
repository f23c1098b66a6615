"""If this fails, a config file of the piano diary no longer runs as it was written there.

The file is put together from the blocks of the diary, in their order; only the device is another. What makes it small
enough for a test is given as overrides on the command line, as a user without a GPU would.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.conftest import SHARED
from tests.recipes.piano.tunes import write_store

Rung = Callable[..., CompletedProcess[str]]
DIARY = SHARED.parent / "seeds" / "piano-gpt-configuration.md"
SMALL = [
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_embd=16",
    "model.context_size=96",
    "data.context_size=96",
    "data.batch_size=2",
    "data.notes_per_record=8",
    "optimizer.gradient_accumulation_steps=2",
    "optimizer.max_iters=3",
    "lr.warmup_iters=1",
    "eval_iters=3",
    "system.compile=false",
    "sampling.num_tokens=16",
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    if not DIARY.exists():
        pytest.skip(f"needs ../shared/seeds/{DIARY.name}")
    blocks = re.findall(r"```yaml\n(.*?)```", DIARY.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 6
    text = "".join(blocks)
    assert text.count("device: 'cuda'") == 1
    file = tmp_path / "diary.yaml"
    file.write_text(text.replace("device: 'cuda'", "device: 'cpu'"), "utf-8")
    write_store(tmp_path / "data" / "epr-labs" / "maestro-sustain-v2")
    return file


def test_its_own_example_is_refused_with_what_it_can_mean(rung: Rung, config: Path) -> None:
    done = rung("train", "piano", "-c", config, *SMALL, check=False)
    assert done.returncode == 2
    assert "init_from=scratch_next_token" in done.stderr
    assert "init_from=scratch " in done.stderr
    assert "Traceback" not in done.stderr


def test_both_stages_run(rung: Rung, config: Path, tmp_path: Path) -> None:
    first = rung("train", "piano", "-c", config, "stage=next_token_pretraining", *SMALL)
    assert "piano/1 finished" in first.stdout
    assert "data.notes_per_record (stage=next_token_pretraining cuts rows by tokens, not by notes)" in first.stdout
    assert "tasks (stage=next_token_pretraining has none)" in first.stdout
    assert "'...', names that are left out" in first.stdout
    second = rung("train", "piano", "-c", config, "init_from=piano/1", *SMALL)
    assert "piano/2 finished" in second.stdout
    assert "weights from" in second.stdout
    assert "tasks=TODO is not decided yet" in second.stdout
    assert "no effect" not in second.stdout
    assert list((tmp_path / "runs" / "piano" / "1" / "mirror" / "wandb").rglob("*.wandb"))
    settled = json.loads(rung("show", "piano/1", "--json").stdout)["config"]
    assert settled["lr"]["lr_decay_iters"] == settled["optimizer"]["max_iters"] == "3"
    assert settled["logging"]["wandb_project"] == "piano-gpt"


def test_every_key_of_it_is_a_key(rung: Rung, config: Path) -> None:
    shown = json.loads(rung("config", "piano", "-c", config, "--json").stdout)
    text = json.dumps(shown)
    assert f"file {config}" in text
    assert len(re.findall(r"\[file\s", rung("config", "piano", "-c", config).stdout)) >= 40  # a long path wraps


@pytest.mark.parametrize("interval", [1, 2])
def test_every_eval_interval_works_and_the_last_step_is_evaluated(rung: Rung, config: Path, interval: int) -> None:
    overrides = [f"eval_interval={interval}", "stage=next_token_pretraining", "logging.wandb_log=false"]
    done = rung("train", "piano", "-c", config, *SMALL, *overrides)
    evaluated = [int(step) for step in re.findall(r"eval full_val at step (\d+)", done.stdout)]
    assert evaluated[-1] == 3
    assert set(range(interval, 4, interval)) <= set(evaluated)

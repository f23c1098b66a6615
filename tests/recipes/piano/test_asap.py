"""If this fails, the piano recipe does not learn from real performances."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import mido
import pytest

from tests.conftest import shared_data


@pytest.mark.slow
def test_five_hundred_steps_on_human_performances(
    rung: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Some minutes on one core; what is printed must be well below a model that ignores all context."""
    rung("data", "piano", "--from", shared_data("piano_asap"), "--name", "asap")
    overrides = [
        "dataset.base_dataset_name=asap",
        "optimizer.max_iters=500",
        "eval_interval=0",
        "logging.log_interval=100",
    ]
    text = rung("train", "piano", "preset=tiny", *overrides).stdout
    found = re.search(r"best full_val loss ([\d.]+) at step 500, unigram ([\d.]+)", text)
    assert found, text
    loss, unigram = map(float, found.groups())
    assert loss < 0.85 * unigram, text
    rung("sample", "piano/1", "--out", tmp_path / "made")
    tunes = [*tmp_path.glob("runs/piano/1/samples/*/*.mid"), *tmp_path.glob("made/*.mid")]
    assert len(tunes) == 2
    for tune in tunes:
        onsets = [m for m in mido.MidiFile(tune) if m.type == "note_on" and m.velocity > 0]
        assert len(onsets) > 20

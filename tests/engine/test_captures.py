"""If this fails, a run that skips bad steps for days fills the disk, or does not say that a capture is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

import rung
from rung.engine import capture
from tests.faults.machine import ARGS

SKIPS = [word for word in ARGS if "=" in word and not word.startswith("lr.")]
SKIPS += ["lr.learning_rate=1e38", "lr.warmup_iters=0", "guard.policy=skip", "guard.most=3", "system.threads=1"]


def test_captures_take_so_much_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is written whatever it takes; of the others the run says that they are not."""
    monkeypatch.setattr(capture, "MOST_BYTES", 1)
    words = list(dict.fromkeys(SKIPS))
    run = rung.train("tests.contract.toy:Toy", words, runs=tmp_path, check=False, display=False)
    diverged = [event["step"] for event in run.events("diverged")]
    assert len(diverged) > 1
    assert capture.steps(run.path / "captures") == diverged[:1]
    told = [event for event in run.events("warning") if "captures may take" in event["text"]]
    assert [event["step"] for event in told] == diverged[1:]

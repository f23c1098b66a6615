"""If this fails, a terminal hides what a run does: a number is dropped, a spike is averaged away, nothing moves."""

from __future__ import annotations

import io
import math
import sys
import time

import pytest
from rich.console import Console

from rung import progress
from rung.progress import Curve, LiveDisplay, patience

ROW = {
    "loss": 2.5, "norm": 0.51, "lr": 2e-4, "targets": 8000.0, "step_s": 0.5, "wait_s": 0.05, "mfu": 0.468,
    "rss_mb": 251.0, "memory_mb": 2048.0, "gpu_load_ratio": 0.97, "gpu_temperature_c": 61.0,
}  # fmt: skip
SHOWN = (
    "step 9/100", "loss 2.5000", "norm 0.51", "lr 2.00e-04", "16k targets/s", "mfu 46.8 %", "wait 10.0 %", "eta 45 s",
    "memory 251 MB", "of the GPU 2.0 GiB", "GPU 97 %", "61 °C", "eval val 2.4000 at step 5", "best 2.4000 at step 5",
    "loss 3 to 2.5",
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_nothing_is_dropped_where_the_terminal_is_narrow(width: int) -> None:
    out = Terminal()
    console = Console(file=out, force_terminal=True, width=width, height=24)
    display = LiveDisplay(100, 10, {"val": {"unigram": 3.5}}, console)
    display.step(0, {**ROW, "loss": 3.0})
    display.eval(5, {"val": {"loss": 2.4}}, True)
    for step in range(1, 10):
        display.step(step, ROW if step < 9 else {name: ROW[name] for name in list(ROW)[:7]})  # the rest is now and then
    lines = display.lines(width)
    display.close()
    assert max(map(len, lines)) <= width
    for text in SHOWN:
        assert any(text in line for line in lines), (text, lines)
    # The eval scrolls above the panel and stays; so does what the panel said last.
    shown = out.getvalue()
    assert "eval val at step 5  loss 2.4000  best so far" in " ".join(shown.split("\n")[0:40]).replace("\r", "")
    assert shown.rstrip().endswith(lines[-1].rstrip() + "\x1b[?25h") or lines[-1].rstrip() in shown[-400:]


def test_a_step_that_is_not_finite_stays_in_the_scrollback() -> None:
    out = Terminal()
    display = LiveDisplay(100, 10, {}, Console(file=out, force_terminal=True, width=80))
    display.step(3, {**ROW, "loss": math.nan})
    display.close()
    assert "step 3/100  loss NaN" in out.getvalue()


def test_the_curve_falls_where_the_loss_falls() -> None:
    curve = Curve()
    for i in range(16):
        curve.add(16.0 - i)
    top, bottom = curve.lines(8, 2)
    assert len(top) == len(bottom) == 8
    assert (top[-2:], bottom[:2]) == ("\u2800" * 2, "\u2800" * 2)  # empty above the end and below the beginning
    assert curve.range() == (1.0, 16.0)


def test_a_spike_and_a_nan_of_a_long_curve_are_seen() -> None:
    curve = Curve()
    for i in range(50_000):
        curve.add(math.nan if i == 25_000 else 1.0)
    (line,) = curve.lines(60, 1)
    assert (len(line), line.count("×")) == (60, 1)
    assert line.index("×") == 30


def test_a_terminal_hears_at_once_what_is_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with patience("building the model"):
        while "building the model … 0 s" not in out.getvalue():
            time.sleep(0.001)
    assert out.getvalue().endswith("\r\033[K")  # and it is gone when that is done


def test_a_log_hears_it_only_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    with patience("building the model"):
        pass
    assert out.getvalue() == ""
    with patience("building the model", after_s=0):
        while not out.getvalue():
            time.sleep(0.001)
    assert out.getvalue() == "building the model\n"


def test_a_log_hears_how_far_long_work_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    report, close = progress.reporter()
    report("tokenising", 0, 50)
    report("tokenising", 10, 50)
    monkeypatch.setattr(progress, "LOG_S", 0.0)
    report("tokenising", 20, 50)
    close()
    assert out.getvalue().splitlines() == ["tokenising ...", "tokenising ... 40 %"]

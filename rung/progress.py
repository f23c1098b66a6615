"""What a person sees of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from rung.text import one_line, visible
from rung.units import count, duration

SMOOTH_STEPS = 20
MOST_PARTS = 6  # of an eval that fit a line
Baselines = Mapping[str, Mapping[str, float]]


class Display(Protocol):
    """What a run shows while it trains; it cannot answer."""

    def step(self, step: int, row: Mapping[str, float]) -> None: ...
    def eval(self, step: int, results: Mapping[str, Mapping[str, float]], is_best: bool) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


MakeDisplay = Callable[[int | None, int, Baselines], Display]  # num_steps, log_interval, baselines of the eval sets


class PlainDisplay:
    """One line every `log_interval` steps, for logs, pipes and notebooks; on `out`, or on the standard output."""

    def __init__(
        self, num_steps: int | None, log_interval: int, baselines: Baselines, out: TextIO | None = None
    ) -> None:
        self._num_steps, self._log_interval, self._baselines, self._out = num_steps, log_interval, baselines, out
        self._recent: deque[Mapping[str, float]] = deque(maxlen=SMOOTH_STEPS)
        self._skipped = 0
        self._is_mute = False

    def step(self, step: int, row: Mapping[str, float]) -> None:
        if self._is_odd(row) or step % self._log_interval == 0 or step + 1 == self._num_steps:
            self.say(self.line(step, row))

    def _is_odd(self, row: Mapping[str, float]) -> bool:
        """Remembers the row; whether it must be shown, because something in it is not finite."""
        self._recent.append(row)
        self._skipped += int(row.get("skipped", 0))
        return not (math.isfinite(row["loss"]) and math.isfinite(row["norm"]))

    def line(self, step: int, row: Mapping[str, float], is_narrow: bool = False) -> str:
        """Fixed columns, units on the numbers; speed and waiting are over the last steps."""
        spent = sum(r["step_s"] for r in self._recent)
        parts = [
            f"step {step}{f'/{self._num_steps}' if self._num_steps else ''}",
            f"loss {_number(row['loss'], '.4f'):<7}",
            f"norm {_number(row['norm'], '.3g'):<6}",
            f"lr {row['lr']:.2e}",
            f"{count(sum(r['targets'] for r in self._recent) / spent) if spent else '?'} targets/s",
            f"wait {100 * sum(r['wait_s'] for r in self._recent) / spent if spent else 0:.1f} %",
        ]
        if known := [r["mfu"] for r in self._recent if "mfu" in r]:
            parts.insert(5, f"mfu {100 * sum(known) / len(known):.1f} %")
        if self._skipped:
            parts.append(f"skipped {self._skipped}")
        if is_narrow:
            parts = [part for part in parts if not part.startswith(("norm", "lr", "mfu", "wait"))]
        if self._num_steps:
            parts.append(f"eta {duration((self._num_steps - step - 1) * spent / len(self._recent))}")
        return "  ".join(parts)

    def eval(self, step: int, results: Mapping[str, Mapping[str, float]], is_best: bool) -> None:
        for number, (name, values) in enumerate(results.items()):
            shown = [(part, value) for part, value in values.items() if part not in ("loss", "loss_se", "targets")]
            parts = [f"{part} {value:.4f}" for part, value in shown]
            if len(parts) > MOST_PARTS:  # all are in the record, and `rung eval` prints them
                parts[MOST_PARTS:] = [f"{len(parts) - MOST_PARTS} more"]
            base = [f"{what} {value:.4f}" for what, value in self._baselines.get(name, {}).items()]
            self.say(
                f"eval {name} at step {step}  loss {_number(values['loss'], '.4f')}"
                f"{'  best so far' if is_best and number == 0 else ''}"
                f"{'  (' + ', '.join(parts) + ')' if parts else ''}{'  against ' + ', '.join(base) if base else ''}"
            )

    def say(self, text: str) -> None:
        if self._is_mute:
            return
        try:
            print(visible(text), file=self._out, flush=True)
        except OSError:  # the reader has gone, as with `| head`, or the disk is full: no reason to stop training
            self._is_mute = True
            if self._out is None:
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - or Python complains when it flushes at exit

    def close(self) -> None:
        pass


class LiveDisplay(PlainDisplay):
    """The same line, in place, with a bar; evals and news scroll above it."""

    REFRESH_S = 0.1  # a redraw costs about a millisecond

    def __init__(self, num_steps: int | None, log_interval: int, baselines: Baselines) -> None:
        super().__init__(num_steps, log_interval, baselines)
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console()
        self._bar = Progress(
            BarColumn(bar_width=16), TextColumn("{task.description}"), console=self._console, auto_refresh=False
        )
        self._task: Any = self._bar.add_task("starting", total=num_steps)
        self._bar.start()
        self._next_s = 0.0

    def step(self, step: int, row: Mapping[str, float]) -> None:
        if self._is_odd(row):
            self.say(self.line(step, row))
        now = time.monotonic()
        if now >= self._next_s or step + 1 == self._num_steps:
            self._next_s = now + self.REFRESH_S
            line = self.line(step, row, is_narrow=self._console.width < 125)
            self._bar.update(self._task, completed=step + 1, description=line, refresh=True)

    def say(self, text: str) -> None:
        self._bar.console.print(visible(text), markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


class Silent:
    """Shows nothing: for ranks that are not the first, and for callers who want none."""

    def __init__(self, *what: Any) -> None: ...
    def step(self, step: int, row: Mapping[str, float]) -> None: ...
    def eval(self, step: int, results: Mapping[str, Mapping[str, float]], is_best: bool) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


def make_display(num_steps: int | None, log_interval: int, baselines: Baselines) -> Display:
    """On the standard output: live on a terminal, plain lines elsewhere."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    kind = LiveDisplay if sys.stdout.isatty() else PlainDisplay
    return kind(num_steps, log_interval, baselines)


@contextmanager
def patience(text: str, after_s: float = 5.0) -> Iterator[None]:
    """Prints `text` if the body takes longer than people wait without a word."""
    timer = threading.Timer(after_s, lambda: print(visible(text), file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def reporter() -> tuple[Callable[[str, int, int], None], Callable[[], None]]:
    """Progress of work that is not training: (report(what, done, total), close())."""
    if not sys.stderr.isatty():
        shown: set[str] = set()

        def report(what: str, done: int, total: int) -> None:
            if what not in shown:
                shown.add(what)
                print(f"{one_line(what)} ...", file=sys.stderr, flush=True)

        return report, lambda: None

    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    tasks: dict[str, Any] = {}
    bar.start()

    def report_live(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(escape(one_line(what)), total=total or None)
        bar.update(tasks[what], completed=done, total=total or None)

    return report_live, bar.stop


def _number(value: float, form: str) -> str:
    if math.isnan(value):
        return "NaN"
    return format(value, form) if math.isfinite(value) else ("inf" if value > 0 else "-inf")

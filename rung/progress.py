"""What a person sees of a run: its state in place on a terminal, plain lines elsewhere."""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rung.report.table import columns
from rung.text import one_line, visible
from rung.units import count, duration

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SMOOTH_STEPS = 20
LOG_S = 10.0  # between lines of progress in a log
MOST_PARTS = 6  # of an eval that fit a line
Baselines = Mapping[str, Mapping[str, float]]


class Display(Protocol):
    """What a run shows while it trains; it cannot answer."""

    def past(self, losses: Sequence[float]) -> None: ...
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

    def past(self, losses: Sequence[float]) -> None:
        """What had been before one began to look."""

    def step(self, step: int, row: Mapping[str, float]) -> None:
        if self._is_odd(row) or step % self._log_interval == 0 or step + 1 == self._num_steps:
            self.say(self.line(step, row))

    def _is_odd(self, row: Mapping[str, float]) -> bool:
        """Remembers the row; whether it must be shown, because something in it is not finite."""
        self._recent.append(row)
        self._skipped += int(row.get("skipped", 0))
        return not (math.isfinite(row.get("loss", 0.0)) and math.isfinite(row.get("norm", 0.0)))

    def line(self, step: int, row: Mapping[str, float]) -> str:
        return "  ".join(self.parts(step, row))

    def parts(self, step: int, row: Mapping[str, float]) -> list[str]:
        """Fixed columns, units on the numbers; speed and waiting are over the last steps. A loop of one's own may log
        only some of them."""
        recent = list(self._recent)  # a display may be drawn by a thread
        timed = [r for r in recent if "step_s" in r]
        spent = sum(r["step_s"] for r in timed)
        parts = [f"step {step}{f'/{self._num_steps}' if self._num_steps else ''}"]
        parts += [f"loss {_number(row['loss'], '.4f'):<7}"] if "loss" in row else []
        parts += [f"norm {_number(row['norm'], '.3g'):<6}"] if "norm" in row else []
        parts += [f"lr {row['lr']:.2e}"] if "lr" in row else []
        if any("targets" in r for r in timed):
            parts.append(f"{count(sum(r.get('targets', 0) for r in timed) / spent) if spent else '?'} targets/s")
        if known := [r["mfu"] for r in recent if "mfu" in r]:
            parts.append(f"mfu {100 * sum(known) / len(known):.1f} %")
        if any("wait_s" in r for r in timed):
            parts.append(f"wait {100 * sum(r.get('wait_s', 0) for r in timed) / spent if spent else 0:.1f} %")
        if self._skipped:
            parts.append(f"skipped {self._skipped}")
        if self._num_steps and timed:
            parts.append(f"eta {duration((self._num_steps - step - 1) * spent / len(timed))}")
        return parts

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
    """The state of the run in place, at the bottom of a terminal; evals and news scroll above it and stay."""

    REFRESH_PER_S = 4  # a redraw costs about a millisecond, in a thread of its own
    STILL_S = 3.0  # without a step, after which one is told for how long

    def __init__(
        self, num_steps: int | None, log_interval: int, baselines: Baselines, console: Console | None = None
    ) -> None:
        super().__init__(num_steps, log_interval, baselines)
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console()
        self._curve = Curve()
        self._known: dict[str, float] = {}  # what only some rows tell
        self._step: int | None = None
        self._begun_s = self._moved_s = time.monotonic()
        self._eval = self._best = ""
        self._live = Live(
            get_renderable=self._panel, console=self._console, refresh_per_second=self.REFRESH_PER_S,
            vertical_overflow="crop",
        )  # fmt: skip
        self._live.start()

    def past(self, losses: Sequence[float]) -> None:
        for loss in losses:
            self._curve.add(loss)

    def step(self, step: int, row: Mapping[str, float]) -> None:
        if self._is_odd(row):
            self.say(self.line(step, row))
        self._curve.add(row.get("loss", math.nan))
        self._known.update(row)
        self._step, self._moved_s = step, time.monotonic()

    def eval(self, step: int, results: Mapping[str, Mapping[str, float]], is_best: bool) -> None:
        super().eval(step, results, is_best)
        name, values = next(iter(results.items()))
        self._eval = f"{name} {_number(values['loss'], '.4f')} at step {step}"
        self._best = f"best {_number(values['loss'], '.4f')} at step {step}" if is_best else self._best

    def say(self, text: str) -> None:
        self._console.print(visible(text), markup=False, highlight=False)

    def close(self) -> None:
        """What was last shown stays, in the scrollback too."""
        self._live.stop()

    def _panel(self) -> RenderableType:
        from rich.text import Text

        return Text("\n".join(self.lines(self._console.width)), no_wrap=True, overflow="ellipsis")

    def lines(self, width: int) -> list[str]:
        """The state in lines of at most `width`: what does not fit one line begins another, nothing is left out."""
        still_s = time.monotonic() - self._moved_s
        if self._step is None:
            return [f"step 0 is under way: {duration(time.monotonic() - self._begun_s)}"]
        row = dict(self._known)
        head = [self._bar(16), *self.parts(self._step, row)]
        if still_s > self.STILL_S:  # an eval, samples, a save: the loop says no more than this
            head.append(f"no step for {duration(still_s)}")
        memory = [f"memory {row['rss_mb']:.0f} MB"] if "rss_mb" in row else []
        if "memory_mb" in row:
            memory.append(f"of the GPU {row['memory_mb'] / 1024:.1f} GiB")
        if "gpu_load_ratio" in row:
            memory.append(f"GPU {100 * row['gpu_load_ratio']:.0f} %")
        if "gpu_temperature_c" in row:
            memory.append(f"{row['gpu_temperature_c']:.0f} °C")
        spent = f"{duration(time.monotonic() - self._begun_s)} so far"
        lines = _joined([part for part in (*head, *memory, spent) if part], width)
        if self._eval:
            lines += _joined([f"eval {self._eval}", self._best], width)
        if len(self._curve) > 1:
            low, high = self._curve.range()
            lines += [f"loss {_number(high, '.4g')} to {_number(low, '.4g')}", *self._curve.lines(min(width, 100), 3)]
        return lines

    def _bar(self, width: int) -> str:
        if not self._num_steps or self._step is None:
            return ""
        done = width * (self._step + 1) // self._num_steps
        return "━" * done + "─" * (width - done)


class Curve:
    """A line of any length as braille: two values in a sign's width, four in its height; what is not finite as ×."""

    MOST = 4096  # values that are kept; then every two become their mean

    def __init__(self) -> None:
        self._values: list[float] = []
        self._each, self._pending = 1, list[float]()

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) < self._each:
            return
        self._values.append(_mean(self._pending))
        self._pending.clear()
        if len(self._values) >= self.MOST:
            self._values = [_mean(self._values[i : i + 2]) for i in range(0, self.MOST, 2)]
            self._each *= 2

    def range(self) -> tuple[float, float]:
        finite = [value for value in list(self._values) if math.isfinite(value)]
        return (min(finite), max(finite)) if finite else (math.nan, math.nan)

    def lines(self, width: int, height: int) -> list[str]:
        values = list(self._values)
        num = min(2 * width, len(values))
        ends = [len(values) * i // num for i in range(num + 1)]
        points = [_mean(values[a:b]) for a, b in itertools.pairwise(ends)]
        finite = [value for value in points if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        scale = (4 * height - 1) / (high - low) if high > low else 0.0
        cells = [[0] * ((num + 1) // 2) for _ in range(height)]
        broken = set()
        before: int | None = None
        for i, value in enumerate(points):
            if not math.isfinite(value):
                broken.add(i // 2)
                before = None
                continue
            y = round((high - value) * scale)
            first, last = sorted((y, y if before is None else before))
            for dot in range(first, last + 1):  # a steep piece is drawn whole
                cells[dot // 4][i // 2] |= _DOTS[dot % 4][i % 2]
            before = y
        rows = ["".join(chr(0x2800 + cell) for cell in row) for row in cells]
        rows[-1] = "".join("×" if i in broken else sign for i, sign in enumerate(rows[-1]))
        return rows


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def _mean(values: Sequence[float]) -> float:
    """NaN where one of them is: a spike or a NaN is not averaged away."""
    return sum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


def _joined(parts: Sequence[str], width: int) -> list[str]:
    """Parts beside each other, in as many lines as they need."""
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


class Silent:
    """Shows nothing: for ranks that are not the first, and for callers who want none."""

    def __init__(self, *what: Any) -> None: ...
    def past(self, losses: Sequence[float]) -> None: ...
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
    """Says what is being done: on a terminal at once and for how long, elsewhere only if it takes longer than people
    wait without a word."""
    done, begun_s = threading.Event(), time.monotonic()
    is_terminal = sys.stderr is not None and sys.stderr.isatty()

    def tell() -> None:
        if not is_terminal:
            if not done.wait(after_s):
                print(visible(text), file=sys.stderr, flush=True)
            return
        while True:
            line = f"{visible(text)} … {time.monotonic() - begun_s:.0f} s"
            print(f"\r{line[: columns() - 1]}\033[K", end="", file=sys.stderr, flush=True)
            if done.wait(1.0):
                print("\r\033[K", end="", file=sys.stderr, flush=True)
                return

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def reporter() -> tuple[Callable[[str, int, int], None], Callable[[], None]]:
    """Progress of work that is not training: (report(what, done, total), close())."""
    if not sys.stderr.isatty():
        told: dict[str, float] = {}  # when

        def report(what: str, done: int, total: int) -> None:
            if what not in told:
                told[what] = time.monotonic()
                print(f"{one_line(what)} ...", file=sys.stderr, flush=True)
            elif time.monotonic() - told[what] >= LOG_S and done:
                told[what] = time.monotonic()
                how_far = f"{100 * done // total} %" if total else count(done)
                print(f"{one_line(what)} ... {how_far}", file=sys.stderr, flush=True)

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

"""Curves as SVG text: the same points give the same bytes, on any machine, with no library.

A curve of any length is drawn from at most MOST_POINTS points, chosen so that no spike and no dip is lost: of each
stretch its first, lowest, highest and last. Values that are not finite leave a gap and a mark, never a line across.

The surprising thing: colours are attributes of light paper, so that the file can be read anywhere, also on GitHub; a
page that holds the SVG outweighs them by class names (html).
"""

from __future__ import annotations

import html
import math
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from rung.text import one_line

MOST_POINTS = 2000
WIDTH, HEIGHT = 760, 340
_RIGHT, _BOTTOM, _EDGE = 24, 46, 14
_COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#57606a")
_FONT = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
_LARGEST, _LEAST = 1e300, 1e-300
_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


@dataclass
class Line:
    """A curve; None in `y` is a value that nobody recorded, NaN or inf one that was not finite."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    is_dotted: bool = False  # few points, each one worth a dot: evals


@dataclass
class Plot:
    title: str
    x_name: str
    lines: list[Line] = field(default_factory=list)
    is_log: bool = False  # values at or below zero then count as not finite


def svg(plot: Plot) -> str:
    """The whole drawing; ends in a newline."""
    drawn = [_thin(line, plot.is_log) for line in plot.lines]
    num_bad = sum(one.num_bad for one in drawn)
    legend, top = _legend([line.name for line in plot.lines], num_bad, plot.is_log)
    ys = [y for one in drawn for y in one.y]
    xs = [x for one in drawn for x in (*one.x, *one.bad)]
    parts = [_text(_EDGE, 24, plot.title, 'font-size="15" font-weight="600"', most=WIDTH - 2 * _EDGE), *legend]
    if not xs:
        parts.append(_text(WIDTH / 2, HEIGHT / 2, "nothing was recorded", 'class="faint" text-anchor="middle"'))
    else:
        y_ticks = _ticks(*_span(ys, plot.is_log), 6, plot.is_log)
        left = _EDGE + max(text_width(tick.text) for tick in y_ticks.ticks) + 8
        area = _Area(left, WIDTH - _RIGHT, top + 20, HEIGHT - _BOTTOM)
        x_ticks = _ticks(min(xs), max(xs), int((area.right - area.left) / 100), False, is_tight=True)
        parts += _frame(area, x_ticks, y_ticks, plot.x_name)
        for i, one in enumerate(drawn):
            parts += _curve(one, area, x_ticks, y_ticks, i)
    label = html.escape(one_line(plot.title), quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="{label}" font-family="{_FONT}" font-size="12">\n'
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


@dataclass
class _Thin:
    """What is drawn of a curve: points, the places in them where the line breaks, and where values were not finite."""

    x: list[float]
    y: list[float]
    breaks: set[int]
    bad: list[float]
    num_bad: int
    is_dotted: bool


def _thin(line: Line, is_log: bool) -> _Thin:
    points = [(x, y) for x, y in zip(line.x, line.y) if y is not None and math.isfinite(x)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    bad = [i for i, y in enumerate(ys) if not math.isfinite(y) or (is_log and y <= 0)]
    # Beyond these a tick or a distance would not be finite; nobody can tell the difference on paper.
    ys = [max(_LEAST if is_log else -_LARGEST, min(_LARGEST, y)) for y in ys]
    kept = thinned(ys, set(bad))
    breaks = {n for n in range(1, len(kept)) if bisect_right(bad, kept[n]) > bisect_right(bad, kept[n - 1])}
    marks = bad if len(bad) <= MOST_POINTS // 5 else bad[:: math.ceil(len(bad) / (MOST_POINTS // 5))]
    return _Thin([xs[i] for i in kept], [ys[i] for i in kept], breaks, [xs[i] for i in marks], len(bad), line.is_dotted)


def thinned(values: Sequence[float], bad: set[int]) -> list[int]:
    """Indices of the points to draw, in order, without the bad ones: all, or of each stretch four."""
    good = [i for i in range(len(values)) if i not in bad] if bad else range(len(values))
    if len(good) <= MOST_POINTS:
        return list(good)
    stretch = math.ceil(len(good) / (MOST_POINTS // 4))
    kept: list[int] = []
    for begin in range(0, len(good), stretch):
        places = good[begin : begin + stretch]
        here = [values[i] for i in places]
        four = {0, here.index(min(here)), here.index(max(here)), len(here) - 1}
        kept += [places[i] for i in sorted(four)]
    return kept


def _span(values: Sequence[float], is_log: bool) -> tuple[float, float]:
    """Lowest and highest, apart from each other."""
    if not values:
        return (1.0, 10.0) if is_log else (0.0, 1.0)
    low, high = min(values), max(values)
    if high - low > max(abs(high) * 1e-12, _LEAST):
        return low, high
    if is_log:
        return low / 2, high * 2
    room = abs(low) * 0.1 if abs(low) > _LEAST else 1.0
    return low - room, high + room


@dataclass
class _Tick:
    value: float
    text: str


@dataclass
class _Ticks:
    """An axis: `low` and `high` are its ends."""

    low: float
    high: float
    ticks: list[_Tick]
    is_log: bool

    def share(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        place = math.log(value) if self.is_log else value
        # Divided first: the distance of two huge numbers may not be finite.
        return (place / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5


def _ticks(low: float, high: float, most: int, is_log: bool, is_tight: bool = False) -> _Ticks:
    """Round values from `low` to `high`; the axis ends at ticks, or where the values end if it is tight."""
    if is_log and high / low >= 8:
        return _log_ticks(low, high)
    if high <= low:
        return _Ticks(low - 1, high + 1, [_Tick(low, labels([low], 1.0)[0])], False)
    step = _round_step((high / 2 - low / 2) / most * 2)
    if is_tight and low == int(low) and high == int(high):
        step = max(step, 1.0)  # there is no step between two steps
    begin, end = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if not is_tight:
        begin, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [i * step for i in range(begin, end + 1) if not is_log or i > 0]
    ticks = [_Tick(value, text) for value, text in zip(values, labels(values, step))]
    if is_tight or (is_log and begin <= 0):
        return _Ticks(low, high, ticks, is_log)
    return _Ticks(min(low, values[0]), max(high, values[-1]), ticks, is_log)


def _log_ticks(low: float, high: float) -> _Ticks:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 8))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    values = [f * 10.0**e for e in range(first, last + 1, every) for f in factors]
    inside = [v for v in values if low / 10 < v <= high * (1 + 1e-9)]
    below = [v for v in inside if v <= low * (1 + 1e-9)]
    ticks = [v for v in inside if not below or v >= below[-1]]
    return _Ticks(min(low, ticks[0]), max(high, ticks[-1]), [_Tick(v, _short(v)) for v in ticks], True)


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= step * (1 - 1e-9))


def labels(values: Sequence[float], step: float) -> list[str]:
    """Ticks as text, with as many digits as tell neighbours apart: 0.25; 12.5k; 5e-05."""
    largest = max(map(abs, values), default=0.0)
    if not 1e-3 <= largest < 1e15:
        return [_short(value) for value in values]
    scale, suffix = next(((s, t) for s, t in _SCALES if largest >= 10 * s and step >= s / 10), (1.0, ""))
    digits = next((d for d in range(12) if abs(round(step / scale, d) - step / scale) < step / scale * 1e-6), 12)
    return [f"{value / scale + 0.0:.{digits}f}{suffix if value else ''}" for value in values]


def _short(value: float) -> str:
    if 1e-3 <= abs(value) < 1e4 or value == 0:
        return f"{value:.6g}"
    digits = next((d for d in range(6) if float(f"{value:.{d}e}") == float(f"{value:.6e}")), 6)
    head, _, power = f"{value:.{digits}e}".partition("e")
    return f"{head}e{int(power)}"


@dataclass
class _Area:
    left: float
    right: float
    top: float
    bottom: float

    def x(self, share: float) -> float:
        return self.left + share * (self.right - self.left)

    def y(self, share: float) -> float:
        return self.bottom - share * (self.bottom - self.top)


def _frame(area: _Area, x_ticks: _Ticks, y_ticks: _Ticks, x_name: str) -> list[str]:
    parts = []
    for tick in y_ticks.ticks:
        y = area.y(y_ticks.share(tick.value))
        parts.append(f'<path class="grid" stroke="#e3e8ed" d="M{_n(area.left)} {_n(y)}H{_n(area.right)}"/>')
        parts.append(_text(area.left - 8, y + 4, tick.text, 'class="faint" fill="#59636e" text-anchor="end"'))
    for tick in x_ticks.ticks:
        x = area.x(x_ticks.share(tick.value))
        parts.append(f'<path class="axis" stroke="#8c959f" d="M{_n(x)} {_n(area.bottom)}v4"/>')
        parts.append(_text(x, area.bottom + 17, tick.text, 'class="faint" fill="#59636e" text-anchor="middle"'))
    parts.append(f'<path class="axis" stroke="#8c959f" d="M{_n(area.left)} {_n(area.bottom)}H{_n(area.right)}"/>')
    middle = (area.left + area.right) / 2
    parts.append(_text(middle, HEIGHT - 10, x_name, 'class="faint" fill="#59636e" text-anchor="middle"'))
    return parts


def _curve(one: _Thin, area: _Area, x_ticks: _Ticks, y_ticks: _Ticks, number: int) -> list[str]:
    colour = number % len(_COLOURS)
    points = [(area.x(x_ticks.share(x)), area.y(y_ticks.share(y))) for x, y in zip(one.x, one.y)]
    path, dots = "", ""
    for i, (x, y) in enumerate(points):
        is_first = i == 0 or i in one.breaks
        path += f"{'M' if is_first else 'L'}{_n(x)} {_n(y)}"
        is_alone = is_first and (i + 1 == len(points) or i + 1 in one.breaks)
        if one.is_dotted or is_alone:
            dots += f"M{_n(x)} {_n(y)}h0"
    look = f'class="c{colour}" fill="none" stroke="{_COLOURS[colour]}" stroke-linejoin="round" stroke-linecap="round"'
    width = 'stroke-width="2"' if one.is_dotted else 'stroke-width="1.2" stroke-opacity="0.75"'
    parts = [f'<path {look} {width} d="{path}"/>'] if path else []
    parts += [f'<path {look} stroke-width="6" d="{dots}"/>'] if dots else []
    if one.bad:
        crosses = "".join(_cross(area.x(x_ticks.share(x)), area.top + 5) for x in one.bad)
        parts.append(f'<path class="bad" fill="none" stroke="#cf222e" stroke-width="1.5" d="{crosses}"/>')
    return parts


def _cross(x: float, y: float) -> str:
    return f"M{_n(x - 3)} {_n(y - 3)}l6 6m0-6l-6 6"


def _legend(names: Sequence[str], num_bad: int, is_log: bool) -> tuple[list[str], float]:
    """Signs and names in rows under the title, and where they end."""
    x, y, parts = float(_EDGE), 46.0, []
    entries = [(name, f'class="c{i % 6}" stroke="{_COLOURS[i % 6]}" stroke-width="3"') for i, name in enumerate(names)]
    if num_bad:
        what = "not finite" if not is_log else "not finite, or not above 0"
        entries.append((f"{what} ({num_bad})", 'class="bad" stroke="#cf222e" stroke-width="1.5"'))
    for name, look in entries:
        room = 24 + min(text_width(one_line(name)), 320) + 18
        if x + room > WIDTH and x > _EDGE:
            x, y = float(_EDGE), y + 18
        is_bad = 'class="bad"' in look
        sign = _cross(x + 9, y - 4) if is_bad else f"M{_n(x)} {_n(y - 4)}h18"
        parts.append(f'<path fill="none" {look} d="{sign}"/>')
        parts.append(_text(x + 24, y, name, most=320))
        x += room
    return parts, y if entries else 30.0


def _text(x: float, y: float, text: str, look: str = "", most: float = math.inf) -> str:
    text = _cut(one_line(text), most)
    colour = "" if "fill=" in look else ' fill="#1f2328"'
    return f'<text x="{_n(x)}" y="{_n(y)}"{colour}{" " if look else ""}{look}>{html.escape(text, quote=True)}</text>'


def _cut(text: str, most: float) -> str:
    if text_width(text) <= most:
        return text
    while text and text_width(text) > most - 10:
        text = text[:-1]
    return f"{text}…"


def text_width(text: str) -> float:
    """About how wide a text of 12 pixels is; a little too wide rather than too narrow."""
    return sum(12.0 if unicodedata.east_asian_width(char) in "WF" else 6.9 for char in text)


def _n(value: float) -> str:
    """A place on the paper, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0") if abs(value) >= 0.05 else "0"

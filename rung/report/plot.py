"""Curves, and points with error bars, as SVG text: the same points give the same bytes, on any machine.

A curve of any length is drawn from at most MOST_POINTS points, chosen so that no spike and no dip is lost: of each
stretch its first, lowest, highest and last. Values that are not finite leave a gap and a mark, never a line across.
Colours are attributes for a light background, so that the file can be read anywhere, also on GitHub; an HTML page
overrides them by class name (html.py).
"""

from __future__ import annotations

import html
import math
import unicodedata
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rung.text import one_line

MOST_POINTS = 2000
WIDTH, HEIGHT = 760, 340
_RIGHT, _BOTTOM, _EDGE = WIDTH - 24, HEIGHT - 46, 14
_COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#57606a")
_FONT = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
_LARGEST, _LEAST = 1e300, 1e-300
_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
_ROOM = 0.04  # of the width of a scatter, on either side of the outermost points
_NEXT = 6.0  # pixels between the labels of two of its ticks


@dataclass
class Line:
    """A curve; None in `y` is a value that nobody recorded, NaN or inf one that was not finite."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    is_dotted: bool = False  # few points, each one worth a dot: evals
    is_faint: bool = False  # as it was recorded, behind the line that follows, whose colour it has


class _Curve(NamedTuple):
    """What is drawn of a line: points, the places in them where it breaks, and where values were not finite."""

    x: list[float]
    y: list[float]
    breaks: set[int]
    bad: list[float]
    num_bad: int


@dataclass
class Plot:
    title: str
    x_name: str
    lines: list[Line] = field(default_factory=list)
    is_log: bool = False  # values at or below zero then count as not finite


@dataclass
class Trace:
    """One set of finite points. `look` is dots, line, or faint: a thin line with small dots, as of one seed."""

    name: str  # in the legend; traces of one name share a colour
    x: Sequence[float]
    y: Sequence[float]
    look: str = "line"
    low: Sequence[float] = ()  # ends of the error bars
    high: Sequence[float] = ()


@dataclass
class Scatter:
    title: str
    x_name: str
    traces: list[Trace] = field(default_factory=list)
    places: Sequence[tuple[float, str]] = ()  # ticks of the axis: the values that were tried, with their labels
    is_log: bool = False  # of the axis; all x are above 0 then
    has_zero: bool = False  # whether 0 belongs on the paper, with a line


def running_mean(values: Sequence[float | None], span: float) -> list[float | None]:
    """The exponential mean of the last `span` values or so, unbiased from the first on; it skips what is not finite."""
    keep, mean, weight = 1 - 1 / max(span, 1.0), 0.0, 0.0
    found: list[float | None] = []
    for value in values:
        if value is not None and math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(mean / weight if weight and value is not None and math.isfinite(value) else value)
    return found


def svg(plot: Plot) -> str:
    """The whole drawing; ends in a newline."""
    drawn = []
    for line in plot.lines:
        points = [(x, y) for x, y in zip(line.x, line.y) if y is not None and math.isfinite(x)]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        bad = [i for i, y in enumerate(ys) if not math.isfinite(y) or (plot.is_log and y <= 0)]
        # Beyond these a tick or a distance would not be finite; nobody can tell the difference on paper.
        ys = [max(_LEAST if plot.is_log else -_LARGEST, min(_LARGEST, y)) for y in ys]
        kept = thinned(ys, set(bad))
        breaks = {n for n in range(1, len(kept)) if bisect_right(bad, kept[n]) > bisect_right(bad, kept[n - 1])}
        marks = bad if len(bad) <= MOST_POINTS // 5 else bad[:: math.ceil(len(bad) / (MOST_POINTS // 5))]
        drawn.append(_Curve([xs[i] for i in kept], [ys[i] for i in kept], breaks, [xs[i] for i in marks], len(bad)))

    names = [line.name for line in plot.lines if not line.is_faint]
    legend, top = _legend(names, sum(one.num_bad for one in drawn), plot.is_log)
    ys = [y for one in drawn for y in one.y]
    xs = [x for one in drawn for x in (*one.x, *one.bad)]
    if not xs:
        empty = _text(WIDTH / 2, HEIGHT / 2, "nothing was recorded", 'class="faint" text-anchor="middle"')
        return _document(plot.title, [*legend, empty])
    y_axis = _axis(*_span(ys, plot.is_log), 6, plot.is_log, start=_BOTTOM, end=top + 20)
    left = _left_of(y_axis)
    num_ticks = int((_RIGHT - left) / 100)
    x_axis = _axis(min(xs), max(xs), num_ticks, False, start=left, end=_RIGHT, is_tight=True)

    parts = [*legend, *_frame(x_axis, y_axis, plot.x_name)]
    number = 0
    for line, one in zip(plot.lines, drawn):
        path, dots = "", ""
        for i, (x, y) in enumerate(zip(one.x, one.y)):
            place = f"{_n(x_axis.place(x))} {_n(y_axis.place(y))}"
            is_first = i == 0 or i in one.breaks
            path += f"{'M' if is_first else 'L'}{place}"
            is_alone = is_first and (i + 1 == len(one.x) or i + 1 in one.breaks)
            if line.is_dotted or is_alone:
                dots += f"M{place}h0"
        colour = number % len(_COLOURS)
        ends = 'stroke-linejoin="round" stroke-linecap="round"'
        style = f'class="c{colour}" fill="none" stroke="{_COLOURS[colour]}" {ends}'
        width = 'stroke-width="2"' if line.is_dotted else 'stroke-width="1.2" stroke-opacity="0.75"'
        width = 'stroke-width="1" stroke-opacity="0.25"' if line.is_faint else width
        number += not line.is_faint
        parts += [f'<path {style} {width} d="{path}"/>'] if path else []
        parts += [f'<path {style} stroke-width="6" d="{dots}"/>'] if dots else []
        if one.bad:
            crosses = "".join(_cross(x_axis.place(x), y_axis.end + 5) for x in one.bad)
            parts.append(f'<path class="bad" fill="none" stroke="#cf222e" stroke-width="1.5" d="{crosses}"/>')
    return _document(plot.title, parts)


def scatter_svg(scatter: Scatter) -> str:
    names = list(dict.fromkeys(trace.name for trace in scatter.traces))
    legend, top = _legend(names if len(names) > 1 or any(names) else [], 0, False)
    ys = [y for trace in scatter.traces for y in (*trace.y, *trace.low, *trace.high) if math.isfinite(y)]
    ys += [0.0] if scatter.has_zero else []
    y_axis = _axis(*_span(ys, False), 6, False, start=_BOTTOM, end=top + 20)

    # From a little before the first place to a little after the last; ticks at the places as far as there is room.
    xs = [x for x, _ in scatter.places]
    low, high = (math.log(min(xs)), math.log(max(xs))) if scatter.is_log else (min(xs), max(xs))
    room = (high - low) * _ROOM or 1.0
    low, high = low - room, high + room
    if scatter.is_log:
        low, high = math.exp(low), math.exp(high)
    x_axis, last = _Axis(low, high, [], scatter.is_log, _left_of(y_axis), _RIGHT), -math.inf
    for x, text in sorted(scatter.places):
        middle, half = x_axis.place(x), text_width(text) / 2
        if middle - half >= last + _NEXT:
            x_axis.ticks.append((x, text))
            last = middle + half

    parts = [*legend, *_frame(x_axis, y_axis, scatter.x_name)]
    if scatter.has_zero:
        zero = _n(y_axis.place(0.0))
        parts.append(f'<path class="axis" stroke="#8c959f" d="M{_n(x_axis.start)} {zero}H{_n(x_axis.end)}"/>')
    for trace in scatter.traces:
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in zip(trace.x, trace.y)]
        colour = names.index(trace.name) % len(_COLOURS)
        style = f'class="c{colour}" fill="none" stroke="{_COLOURS[colour]}" stroke-linecap="round"'
        path = "".join(f"{'L' if i else 'M'}{_n(x)} {_n(y)}" for i, (x, y) in enumerate(places))
        dots = "".join(f"M{_n(x)} {_n(y)}h0" for x, y in places)
        parts += {
            "line": [f'<path {style} stroke-width="2" d="{path}"/>', f'<path {style} stroke-width="7" d="{dots}"/>'],
            "dots": [f'<path {style} stroke-width="5" stroke-opacity="0.6" d="{dots}"/>'],
            "faint": [
                f'<path {style} stroke-width="1" stroke-opacity="0.35" d="{path}"/>',
                f'<path {style} stroke-width="4.5" stroke-opacity="0.5" d="{dots}"/>',
            ],
        }[trace.look]
        bars = ""
        for (x, _), *ends in zip(places, trace.low, trace.high):
            # An end that is infinite is drawn to the edge of the paper.
            lower, upper = (
                _n(min(y_axis.start, max(y_axis.end, y_axis.place(end))) if math.isfinite(end) else edge)
                for end, edge in zip(ends, (y_axis.start, y_axis.end))
            )
            bars += f"M{_n(x)} {lower}V{upper}M{_n(x - 4)} {lower}h8M{_n(x - 4)} {upper}h8"
        parts += [f'<path {style} stroke-width="1.5" d="{bars}"/>'] if bars else []
    return _document(scatter.title, parts)


def _document(title: str, parts: Sequence[str]) -> str:
    label = html.escape(one_line(title), quote=True)
    head = _text(_EDGE, 24, title, 'font-size="15" font-weight="600"', most=WIDTH - 2 * _EDGE)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="{label}" font-family="{_FONT}" font-size="12">\n'
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>\n'
        + "\n".join([head, *parts])
        + "\n</svg>\n"
    )


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
class _Axis:
    """From `low` to `high`, which lie at the pixels `start` and `end`."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    is_log: bool
    start: float
    end: float

    def place(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        value = math.log(value) if self.is_log else value
        # Divided first: the distance of two huge numbers may not be finite.
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def _axis(low: float, high: float, most: int, is_log: bool, start: float, end: float, is_tight: bool = False) -> _Axis:
    """Round values from `low` to `high`; the axis ends at ticks, or where the values end if it is tight."""
    if is_log and high / low >= 8:
        first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        every = max(1, math.ceil((last - first) / 8))
        factors = (1, 2, 5) if last - first <= 2 else (1,)
        values = [f * 10.0**e for e in range(first, last + 1, every) for f in factors]
        inside = [v for v in values if low / 10 < v <= high * (1 + 1e-9)]
        below = [v for v in inside if v <= low * (1 + 1e-9)]
        values = [v for v in inside if not below or v >= below[-1]]
        ticks = [(value, _short(value)) for value in values]
        return _Axis(min(low, values[0]), max(high, values[-1]), ticks, True, start, end)
    rough = (high / 2 - low / 2) / most * 2
    if rough < _LEAST:
        return _Axis(low - 1, high + 1, [(low, labels([low], 1.0)[0])], False, start, end)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * (1 - 1e-9))
    if is_tight and low == int(low) and high == int(high):
        step = max(step, 1.0)  # there is no step between two steps
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if not is_tight:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [i * step for i in range(first, last + 1) if not is_log or i > 0]
    if not is_tight and not (is_log and first <= 0):
        low, high = min(low, values[0]), max(high, values[-1])
    return _Axis(low, high, list(zip(values, labels(values, step))), is_log, start, end)


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


def _left_of(y_axis: _Axis) -> float:
    """Where the paper begins, after the labels of the ticks."""
    return _EDGE + max(text_width(text) for _, text in y_axis.ticks) + 8


def _frame(x_axis: _Axis, y_axis: _Axis, x_name: str) -> list[str]:
    parts, left, right, bottom = [], x_axis.start, x_axis.end, y_axis.start
    for value, text in y_axis.ticks:
        y = y_axis.place(value)
        parts.append(f'<path class="grid" stroke="#e3e8ed" d="M{_n(left)} {_n(y)}H{_n(right)}"/>')
        parts.append(_text(left - 8, y + 4, text, 'class="faint" fill="#59636e" text-anchor="end"'))
    for value, text in x_axis.ticks:
        x = x_axis.place(value)
        parts.append(f'<path class="axis" stroke="#8c959f" d="M{_n(x)} {_n(bottom)}v4"/>')
        parts.append(_text(x, bottom + 17, text, 'class="faint" fill="#59636e" text-anchor="middle"'))
    parts.append(f'<path class="axis" stroke="#8c959f" d="M{_n(left)} {_n(bottom)}H{_n(right)}"/>')
    middle = (left + right) / 2
    parts.append(_text(middle, HEIGHT - 10, x_name, 'class="faint" fill="#59636e" text-anchor="middle"'))
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
    text = one_line(text)
    if text_width(text) > most:
        while text and text_width(text) > most - 10:
            text = text[:-1]
        text = f"{text}…"
    colour = "" if "fill=" in look else ' fill="#1f2328"'
    return f'<text x="{_n(x)}" y="{_n(y)}"{colour}{" " if look else ""}{look}>{html.escape(text, quote=True)}</text>'


def text_width(text: str) -> float:
    """About how wide a text of 12 pixels is; a little too wide rather than too narrow."""
    return sum(12.0 if unicodedata.east_asian_width(char) in "WF" else 6.9 for char in text)


def _n(value: float) -> str:
    """A place on the paper, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0") if abs(value) >= 0.05 else "0"

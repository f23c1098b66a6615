"""Points with error bars over a linear or logarithmic axis, as SVG text: what a sweep shows.

The same points give the same bytes. The paper, the ticks and the legend are those of plot; what is drawn on it is here.
Values that are not finite are left out by whoever calls.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rung.compare import plot
from rung.text import one_line

_ROOM = 0.04  # of the width, on either side of the outermost points
_NEXT = 6.0  # pixels between the labels of two ticks


@dataclass
class Trace:
    """One set of points. `look` is dots, line, or faint: a thin line with small dots, as of one seed."""

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
    places: Sequence[tuple[float, str]] = ()  # ticks of the axis: the values that were tried, with their words
    is_log: bool = False  # of the axis; all x are above 0 then
    has_zero: bool = False  # whether 0 belongs on the paper, with a line


def svg(scatter: Scatter) -> str:
    """The whole drawing; ends in a newline."""
    names = list(dict.fromkeys(trace.name for trace in scatter.traces))
    legend, top = plot._legend(names if len(names) > 1 or any(names) else [], 0, False)
    title = plot._text(plot._EDGE, 24, scatter.title, 'font-size="15" font-weight="600"', most=plot.WIDTH - 28)
    ys = [y for trace in scatter.traces for y in (*trace.y, *_finite(trace.low), *_finite(trace.high))]
    ys += [0.0] if scatter.has_zero else []
    y_ticks = plot._ticks(*plot._span(ys, False), 6, False)
    left = plot._EDGE + max(plot.text_width(tick.text) for tick in y_ticks.ticks) + 8
    area = plot._Area(left, plot.WIDTH - plot._RIGHT, top + 20, plot.HEIGHT - plot._BOTTOM)
    x_ticks = _axis(scatter, area)
    parts = [title, *legend, *plot._frame(area, x_ticks, y_ticks, scatter.x_name)]
    if scatter.has_zero:
        zero = plot._n(area.y(y_ticks.share(0.0)))
        parts.append(f'<path class="axis" stroke="#8c959f" d="M{plot._n(area.left)} {zero}H{plot._n(area.right)}"/>')
    for trace in scatter.traces:
        places = [(area.x(x_ticks.share(x)), area.y(y_ticks.share(y))) for x, y in zip(trace.x, trace.y)]
        bars = [tuple(min(area.bottom, max(area.top, area.y(y_ticks.share(end)))) if math.isfinite(end) else edge
                      for end, edge in ((low, area.bottom), (high, area.top)))
                for low, high in zip(trace.low, trace.high)]  # fmt: skip
        parts += _drawn(trace.look, places, bars, names.index(trace.name) % len(plot._COLOURS))
    label = html.escape(one_line(scatter.title), quote=True)
    size = f'viewBox="0 0 {plot.WIDTH} {plot.HEIGHT}" width="{plot.WIDTH}" height="{plot.HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" {size} role="img" aria-label="{label}" '
        f'font-family="{plot._FONT}" font-size="12">\n'
        f'<rect class="ground" width="{plot.WIDTH}" height="{plot.HEIGHT}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _axis(scatter: Scatter, area: plot._Area) -> plot._Ticks:
    """From a little before the first place to a little after the last; ticks at the places as far as there is room."""
    xs = [x for x, _ in scatter.places]
    low, high = (math.log(min(xs)), math.log(max(xs))) if scatter.is_log else (min(xs), max(xs))
    room = (high - low) * _ROOM or 1.0
    low, high = low - room, high + room
    if scatter.is_log:
        low, high = math.exp(low), math.exp(high)
    axis = plot._Ticks(low, high, [], scatter.is_log)
    last = -math.inf
    for x, text in sorted(scatter.places):
        middle, half = area.x(axis.share(x)), plot.text_width(text) / 2
        if middle - half >= last + _NEXT:
            axis.ticks.append(plot._Tick(x, text))
            last = middle + half
    return axis


def _drawn(
    look: str, places: Sequence[tuple[float, float]], bars: Sequence[tuple[float, ...]], colour: int
) -> list[str]:
    n = plot._n
    style = f'class="c{colour}" fill="none" stroke="{plot._COLOURS[colour]}" stroke-linecap="round"'
    path = "".join(f"{'L' if i else 'M'}{n(x)} {n(y)}" for i, (x, y) in enumerate(places))
    dots = "".join(f"M{n(x)} {n(y)}h0" for x, y in places)
    ends = "".join(
        f"M{n(x)} {n(low)}V{n(high)}M{n(x - 4)} {n(low)}h8M{n(x - 4)} {n(high)}h8"
        for (x, _), (low, high) in zip(places, bars)
    )
    lines = {
        "line": [f'<path {style} stroke-width="2" d="{path}"/>', f'<path {style} stroke-width="7" d="{dots}"/>'],
        "dots": [f'<path {style} stroke-width="5" stroke-opacity="0.6" d="{dots}"/>'],
        "faint": [
            f'<path {style} stroke-width="1" stroke-opacity="0.35" d="{path}"/>',
            f'<path {style} stroke-width="4.5" stroke-opacity="0.5" d="{dots}"/>',
        ],
    }[look]
    return [*lines, *([f'<path {style} stroke-width="1.5" d="{ends}"/>'] if ends else [])]

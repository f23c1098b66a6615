"""Small pictures of numbers, as SVG text: lines, bars, histograms.

They are read on a page beside the words that explain them, so they have a white ground of their own, labels large
enough for a phone, and nothing that moves. The same numbers give the same bytes. Choosing what to show is for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

COLORS = ("#1f6fb4", "#d95f02", "#1b9e77", "#7570b3", "#b8860b", "#c2185b")  # told apart by the colour-blind too
INK, FAINT = "#222222", "#d8d8d8"
WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 52


class Series(NamedTuple):
    name: str
    y: Sequence[float]
    low: Sequence[float] = ()  # a band around the line
    high: Sequence[float] = ()


class Histogram(NamedTuple):
    name: str
    counts: Sequence[int]
    edges: Sequence[float]  # one more than counts


def line_chart(title: str, x: Sequence[float], series: Sequence[Series], x_label: str, y_label: str) -> str:
    """One or more lines over the same x, from 0 up; the first one's band, if any, lies below all lines."""
    top = max((max((*one.y, *one.high)) for one in series), default=0) or 1
    ticks = nice_ticks(0, top)
    parts = _frame(title, x_label, y_label)
    at_x = _scaled(min(x), max(x), LEFT, WIDTH - RIGHT)
    at_y = _scaled(0, ticks[-1], HEIGHT - BOTTOM, TOP)
    for tick in ticks:
        parts.append(_line(LEFT, at_y(tick), WIDTH - RIGHT, at_y(tick), FAINT))
        parts.append(_label(LEFT - 8, at_y(tick) + 4, number(tick), "end"))
    for value in x:
        parts.append(_label(at_x(value), HEIGHT - BOTTOM + 18, number(value), "middle"))
    for one, color in zip(series, _colors()):
        if len(one.low):
            around = [*zip(x, one.high), *reversed([*zip(x, one.low)])]
            points = " ".join(f"{at_x(a):.1f},{at_y(b):.1f}" for a, b in around)
            parts.append(f'<polygon points="{points}" fill="{color}" fill-opacity="0.18"/>')
    for one, color in zip(series, _colors()):
        points = " ".join(f"{at_x(a):.1f},{at_y(b):.1f}" for a, b in zip(x, one.y))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{at_x(a):.1f}" cy="{at_y(b):.1f}" r="3.5" fill="{color}"/>' for a, b in zip(x, one.y)]
    if len(series) > 1:
        parts += _legend([one.name for one in series])
    return _svg(WIDTH, HEIGHT, parts)


def bar_chart(title: str, labels: Sequence[str], groups: Sequence[Series], y_label: str) -> str:
    """Lying bars, one for each label and group; their values stand beside them."""
    thick, space = 13, 10
    row = thick * len(groups) + space
    left, height = 24 + 8 * max(map(len, labels), default=0), TOP + row * len(labels) + 38
    ticks = nice_ticks(0, max((max(group.y) for group in groups), default=0) or 1)
    at_x = _scaled(0, ticks[-1], left, WIDTH - RIGHT - 48)
    parts = [_title(title)]
    for tick in ticks:
        parts.append(_line(at_x(tick), TOP, at_x(tick), height - 38, FAINT))
        parts.append(_label(at_x(tick), height - 22, number(tick), "middle"))
    parts.append(_label((left + WIDTH) / 2, height - 6, y_label, "middle"))
    for i, label in enumerate(labels):
        top = TOP + i * row + space / 2
        parts.append(_label(left - 8, top + thick * len(groups) / 2 + 4, label, "end"))
        for j, (group, color) in enumerate(zip(groups, _colors())):
            y, end = top + j * thick, at_x(group.y[i])
            parts.append(f'<rect x="{left}" y="{y:.1f}" width="{end - left:.1f}" height="{thick - 2}" fill="{color}"/>')
            parts.append(_label(end + 5, y + thick - 3, number(group.y[i]), size=11))
    if len(groups) > 1:
        parts += _legend([group.name for group in groups])
    return _svg(WIDTH, height, parts)


def histograms(title: str, charts: Sequence[Histogram]) -> str:
    """Small multiples, three in a row, each with its own range and its own height."""
    wide, high = WIDTH / 3, 150
    height = TOP + high * math.ceil(len(charts) / 3)
    parts = [_title(title)]
    for k, chart in enumerate(charts):
        x, y = wide * (k % 3) + 14, TOP + high * (k // 3)
        base, width, top = y + high - 34, wide - 28, max(chart.counts, default=0) or 1
        bar = width / max(1, len(chart.counts))
        parts.append(_label(x, y + 12, chart.name, size=13))
        for i, count in enumerate(chart.counts):
            tall = (high - 58) * count / top
            if count:
                parts.append(
                    f'<rect x="{x + i * bar:.1f}" y="{base - tall:.1f}" width="{max(bar - 0.6, 0.6):.1f}" '
                    f'height="{tall:.1f}" fill="{COLORS[0]}"/>'
                )
        parts.append(_line(x, base, x + width, base, INK))
        low, last = chart.edges[0], chart.edges[-1]
        parts.append(_label(x, base + 15, number(low), size=11))
        parts.append(_label(x + width, base + 15, number(last), "end", size=11))
        if low < 0 < last:
            zero = x + width * -low / (last - low)
            parts.append(_line(zero, base, zero, base + 4, INK))
            if 0.15 < -low / (last - low) < 0.85:
                parts.append(_label(zero, base + 15, "0", "middle", size=11))
    return _svg(WIDTH, height, parts)


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    span = high - low
    if not (math.isfinite(span) and span > 1e-300):
        return [low, low + 1]
    raw = span / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [k * step for k in range(first, last + 1)]


def number(value: float) -> str:
    """Three digits, without the zeros that say nothing."""
    text = f"{value:.3g}"
    return "0" if text == "-0" else text.replace("e-0", "e-").replace("e+0", "e")


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [
        _title(title),
        _label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, x_label, "middle"),
        f'<text x="16" y="{middle:.1f}" font-size="12" text-anchor="middle" fill="{INK}" '
        f'transform="rotate(-90 16 {middle:.1f})">{escape(y_label)}</text>',
    ]


def _legend(names: Sequence[str]) -> list[str]:
    parts: list[str] = []
    x = float(WIDTH - RIGHT)
    for name, color in reversed([*zip(names, _colors())]):
        x -= 8 * len(name) + 22
        parts.append(f'<rect x="{x:.1f}" y="14" width="10" height="10" fill="{color}"/>')
        parts.append(_label(x + 15, 23, name))
    return parts


def _colors() -> list[str]:
    return [*COLORS] * 4


def _scaled(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    span = (high - low) or 1
    return lambda value: first + (min(max(value, low), high) - low) / span * (last - first)


def _title(text: str) -> str:
    return f'<text x="14" y="24" font-size="15" font-weight="bold" fill="{INK}">{escape(text)}</text>'


def _label(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {where} fill="{INK}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"

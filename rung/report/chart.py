"""Bars and histograms as SVG text, in the look of report's plots."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rung.report.plot import WIDTH

COLORS, INK = ("#0969da", "#bc4c00", "#1a7f37"), "#1f2328"
TOP = 40  # pixels for the title of a drawing


def number(value: float) -> str:
    """Three digits, without trailing zeros."""
    text = f"{value:.3g}"
    return "0" if text == "-0" else text.replace("e-0", "e-").replace("e+0", "e")


def bar_chart(title: str, labels: Sequence[str], groups: Mapping[str, Sequence[float]]) -> str:
    """Lying bars as SVG, one for each label and group; their values stand beside them."""
    thick, space = 13, 10
    row = thick * len(groups) + space
    left, height = 24 + 8 * max(map(len, labels)), TOP + row * len(labels)
    room, most = WIDTH - 80 - left, max(map(max, groups.values())) or 1
    parts, legend_x = [], float(WIDTH)
    for i, label in enumerate(labels):
        parts.append(_label(left - 8, TOP + i * row + row / 2 + 4, label, "end"))
    for j, ((name, values), color) in reversed([*enumerate(zip(groups.items(), COLORS))]):
        for i, value in enumerate(values):
            y, long = TOP + i * row + space / 2 + j * thick, room * (value / most)
            parts.append(_bar(left, y, long, thick - 2, color))
            parts.append(_label(left + long + 5, y + thick - 3, number(value), size=11))
        if name:
            legend_x -= 8 * len(name) + 28
            parts += [_bar(legend_x, 14, 10, 10, color), _label(legend_x + 15, 23, name)]
    return _svg(title, height, parts)


def histograms(title: str, charts: Mapping[str, Mapping[str, Any]]) -> str:
    """Small multiples as SVG, three in a row, each with its own range and its own height."""
    wide, high = WIDTH / 3, 150
    parts = []
    for k, (name, chart) in enumerate(charts.items()):
        counts, low, last = chart["counts"], chart["edges"][0], chart["edges"][-1]
        x, y = wide * (k % 3) + 14, TOP + high * (k // 3)
        base, width, top = y + high - 34, wide - 28, max(counts) or 1
        bar = width / len(counts)
        parts.append(_label(x, y + 12, name, size=13))
        for i, count in enumerate(counts):
            tall = (high - 58) * (count / top)
            if count:
                parts.append(_bar(x + i * bar, base - tall, max(bar - 0.6, 0.6), tall, COLORS[0]))
        parts.append(_bar(x, base, width, 1, INK))
        parts.append(_label(x, base + 15, number(low), size=11))
        parts.append(_label(x + width, base + 15, number(last), "end", size=11))
        if low < 0 < last:
            share = -low / (last - low)
            parts.append(_bar(x + width * share, base, 1, 4, INK))
            if 0.15 < share < 0.85:
                parts.append(_label(x + width * share, base + 15, "0", "middle", size=11))
    return _svg(title, TOP + high * math.ceil(len(charts) / 3), parts)


def _label(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {where} fill="{INK}">{escape(text)}</text>'


def _bar(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">'
    top = f'<text x="14" y="24" font-size="15" font-weight="bold" fill="{INK}">{escape(title)}</text>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', top, *parts, "</svg>"]) + "\n"

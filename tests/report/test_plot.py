"""If this fails, a spike or a NaN is missing from a curve, a tick lies, or the same run draws two different files."""

from __future__ import annotations

import hashlib
import math
import random
import re
import xml.etree.ElementTree as ET
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rung.report.plot import MOST_POINTS, WIDTH, Line, Plot, labels, svg, text_width, thinned

NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=64)
SPACE = "{http://www.w3.org/2000/svg}"


def curve(text: str, number: int = 0) -> list[tuple[float, float]]:
    """The points of a drawn line, on paper."""
    paths = [p for p in ET.fromstring(text).iter(f"{SPACE}path") if p.get("class") == f"c{number}"]
    drawn = [p.get("d") or "" for p in paths if "L" in (p.get("d") or "") or "M" in (p.get("d") or "")]
    longest = max(drawn, key=len)
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", longest)]


def texts(text: str) -> list[ET.Element]:
    return list(ET.fromstring(text).iter(f"{SPACE}text"))


def test_a_million_points_become_few_and_no_spike_is_lost() -> None:
    chance = random.Random(0)
    values = [3.0 + chance.gauss(0, 0.1) for _ in range(1_000_000)]
    spikes = [chance.randrange(len(values)) for _ in range(20)]
    for place in spikes:
        values[place] = 9.0 + place / 1e7
    kept = thinned(values, set())
    assert len(kept) <= MOST_POINTS
    assert kept == sorted(set(kept))
    assert {kept[0], kept[-1]} == {0, len(values) - 1}
    stretch = math.ceil(len(values) / (MOST_POINTS // 4))
    highest = {}
    for place in spikes:
        part = place // stretch
        highest[part] = max(highest.get(part, 0.0), values[place])
    assert set(highest.values()) <= {values[i] for i in kept}
    drawing = svg(Plot("loss", "step", [Line("training", range(len(values)), values)]))
    assert len(curve(drawing)) <= MOST_POINTS
    assert len(drawing) < 60_000


@given(st.lists(NUMBERS, max_size=300), st.integers(4, 40))
def test_thinning_keeps_the_ends_of_every_range(values: list[float], most: int) -> None:
    """Against a plain search: the lowest and the highest value of the whole curve are always drawn."""
    bad = {i for i, value in enumerate(values) if not math.isfinite(value)}
    with mock.patch("rung.report.plot.MOST_POINTS", most):
        kept = thinned(values, bad)
    assert len(kept) <= most
    good = [i for i in range(len(values)) if i not in bad]
    assert set(kept) <= set(good)
    if good:
        assert min(values[i] for i in kept) == min(values[i] for i in good)
        assert max(values[i] for i in kept) == max(values[i] for i in good)


@given(
    st.lists(st.tuples(st.floats(-1e9, 1e9), st.one_of(st.none(), NUMBERS)), max_size=40), st.booleans(), st.booleans()
)
@example([(0.0, 0.0), (5e-324, 0.0)], False, False)  # no tick lies between the two
def test_any_points_give_a_whole_drawing_on_the_paper(
    points: list[tuple[float, float | None]], is_log: bool, is_dotted: bool
) -> None:
    line = Line("a <name> & more", [x for x, _ in points], [y for _, y in points], is_dotted)
    drawing = svg(Plot("title", "step", [line], is_log))
    root = ET.fromstring(drawing)
    numbers = [float(n) for p in root.iter(f"{SPACE}path") for n in re.findall(r"-?[\d.]+", p.get("d") or "")]
    assert all(-8 <= n <= WIDTH + 8 for n in numbers), numbers
    assert "nan" not in drawing
    assert "inf" not in drawing.replace("infinite", "")
    assert drawing == svg(Plot("title", "step", [line], is_log))


def test_the_bytes_do_not_change() -> None:
    """A page under version control must not change by itself; think before this hash is renewed."""
    line = Line("training", range(100), [7.0 / (1 + i / 20) if i != 50 else math.nan for i in range(100)])
    drawing = svg(Plot("piano/1: loss", "step", [line, Line("val", [0, 50, 99], [7.0, 2.2, 1.3], True)]))
    assert hashlib.sha256(drawing.encode()).hexdigest()[:16] == "9b59adcc567fca9f"


def test_not_finite_leaves_a_gap_and_a_mark() -> None:
    values: list[float | None] = [3.0, 2.9, math.nan, 2.7, math.inf, None, 2.5]
    drawing = svg(Plot("loss", "step", [Line("training", range(7), values)]))
    (path,) = [p for p in ET.fromstring(drawing).iter(f"{SPACE}path") if (p.get("d") or "").count("M") == 3
               and p.get("class") == "c0"]  # fmt: skip
    pieces = (path.get("d") or "").split("M")[1:]
    assert [piece.count("L") for piece in pieces] == [1, 0, 0]  # two joined, then 2.7 alone, then 2.5 alone
    marks = [p for p in ET.fromstring(drawing).iter(f"{SPACE}path") if p.get("class") == "bad"]
    assert sum((p.get("d") or "").count("M") for p in marks) == 2 + 1  # and the sign in the legend
    assert "not finite (2)" in [t.text for t in texts(drawing)]


def test_a_value_of_zero_has_no_place_on_a_log_axis_and_is_told() -> None:
    drawing = svg(Plot("x", "step", [Line("a", [0, 1, 2, 3], [1.0, 0.0, 10.0, 1000.0])], is_log=True))
    assert "not finite, or not above 0 (1)" in [t.text for t in texts(drawing)]
    ys = [y for _, y in curve(drawing)]
    assert ys[1] - ys[0] == pytest.approx((ys[2] - ys[1]) / 2, abs=0.2)  # one decade, then two


def test_a_value_stands_at_its_tick() -> None:
    drawing = svg(Plot("x", "step", [Line("a", [0, 10], [2.0, 4.0])]))
    places = {t.text: float(t.get("y") or 0) - 4 for t in texts(drawing) if t.get("text-anchor") == "end"}
    assert [y for _, y in curve(drawing)] == [places["2.0"], places["4.0"]]


@given(st.integers(-6, 9), st.sampled_from([1, 2, 2.5, 5]), st.integers(-4, 4), st.integers(2, 8))
def test_labels_tell_neighbours_apart(power: int, factor: float, first: int, num: int) -> None:
    step = factor * 10.0**power
    values = [i * step for i in range(first, first + num)]
    found = labels(values, step)
    assert len(set(found)) == num
    scale = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    read = [float(t.rstrip("kMBT")) * scale.get(t[-1], 1.0) for t in found]
    assert read == pytest.approx(values, rel=1e-6)


def test_no_text_lies_on_another() -> None:
    names = [f"a rather long name of a metric, number {i}" for i in range(7)]
    lines = [
        Line(name, range(1_000_000, 1_000_100), [i * 1e-5 * j for j in range(100)]) for i, name in enumerate(names)
    ]
    boxes = []
    for element in texts(svg(Plot("a title", "step", lines))):
        width = text_width(element.text or "")
        x, y = float(element.get("x") or 0), float(element.get("y") or 0)
        x -= {"middle": width / 2, "end": width}.get(element.get("text-anchor") or "", 0.0)
        boxes.append((x, y - 9, x + width, y + 3, element.text))
    for i, one in enumerate(boxes):
        assert one[0] >= 0
        for other in boxes[i + 1 :]:
            is_apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert is_apart, (one, other)


@pytest.mark.parametrize("values", [[], [None, None], [2.5], [math.nan], [5.0, 5.0], [0.0, 0.0], [-1e308, 1e308]])
def test_odd_curves_are_drawn(values: list[float | None]) -> None:
    for is_log in (False, True):
        ET.fromstring(svg(Plot("x", "step", [Line("a", range(len(values)), values)], is_log)))
    assert ("nothing was recorded" in svg(Plot("x", "step", [Line("a", range(len(values)), values)]))) == (
        not [v for v in values if v is not None]
    )

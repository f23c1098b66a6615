"""What may be concluded from a study, as blocks of its page: the best point and whether it is one, and the fits.

Where the figures cannot tell, the sentence says so; the figures themselves are those of effects and fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rung.compare.blocks import Block, Bullets, Heading, Paragraph, Spans, bold
from rung.compare.lineage import value_text
from rung.compare.scaling.effects import Fits, Series, best, fits
from rung.compare.scaling.fit import Interval, PowerFit
from rung.compare.scaling.study import Study
from rung.compare.scaling.wording import estimate, figure, rms, short
from rung.text import one_line


def best_blocks(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    items: list[Spans] = []
    for one in series:
        found = best(study, one)
        if found is None or one.is_control:
            continue
        seeds = f"mean of {found.num_seeds} seeds" if found.num_seeds > 1 else "one seed"
        label = f"{one.label}: " if one.label else ""
        beside = "".join(
            f", {one_line(key)} = {value_text(value)}" for key, value in one.at(found.at)[0].beside.items()
        )
        text = f"{beside}, {figure(found.mean)} ({seeds}). "
        if found.difference is not None and found.difference.is_known:
            tells = "which it cannot be told from" if found.difference.covers_zero else "which is worse"
            difference = estimate(found.difference, "difference")
            text += f"Next is {value_text(found.second)}, {tells}: {difference}. "
        else:
            text += f"Next is {value_text(found.second)}; one seed cannot tell the two apart. "
        if num := study.diverged[value_text(found.at)]:
            text += f"{num} run{'s' if num > 1 else ''} there diverged. "
        if found.is_edge:
            text += "It is at the edge of what was tried: the optimum may lie beyond it."
        elif study.is_numeric and len(one.places) > 2:
            text += "It is not at the edge of what was tried."
        items.append([label, bold(f"{one_line(study.x)} = {value_text(found.at)}"), text.rstrip()])
    if items:
        yield Heading(2, ["best"])
        yield Bullets(items)


def fit_blocks(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    found = [(one, fit) for one in series if (fit := fits(study, one)) is not None]
    if not found:
        return
    yield Heading(2, ["fit"])
    yield Paragraph([f"Within a seed, {found[0][1].of}: each seed has its own level, and what is fitted is how it "
                     "moves."])  # fmt: skip
    for one, fit in found:
        label = f"{one.label}: " if one.label else ""
        yield Bullets([[label, *spans] for spans in _fit_items(study, fit)])


def _fit_items(study: Study, fit: Fits) -> Iterator[Spans]:
    x, law = short(study), fit.power
    if fit.line is not None:
        over = f"{fit.line.num_seeds} seeds" if fit.line.num_seeds > 1 else f"{fit.num_points} points of one seed"
        level, slope = fit.line.intercept, fit.line.slope
        found = f"a = {estimate(level, 'figure')}, b = {estimate(slope, 'difference')} over {over}"
        left = f"residuals {figure(rms(fit.line.residuals))} (rms)"
        yield [bold(f"a + b log2({x})"), f": {found}; {left}. {_slope_words(slope)}"]
    if law is None:
        if fit.why_no_power:
            yield [bold(f"c + d {x}^-e"), f": not fitted: {fit.why_no_power}."]
        return
    found = f"c = {estimate(law.floor, 'figure')}, d = {estimate(law.gain, 'figure')}, "
    found += f"e = {estimate(law.exponent, 'exponent')}"
    left = f"residuals {figure(rms(law.residuals))} (rms)"
    yield [bold(f"c + d ({x} / {law.first:g})^-e"), f": {found}; {left}.{_law_words(law)}"]


def _slope_words(slope: Interval) -> str:
    if not slope.is_known:
        return "Too few points for an interval: the data cannot tell whether there is a slope."
    if slope.covers_zero:
        return "The interval covers 0: the data cannot tell whether there is a slope."
    return f"Each doubling {'lowers' if slope.value < 0 else 'raises'} it."


def _law_words(law: PowerFit) -> str:
    if law.gain.covers_zero:
        return " The interval of d covers 0: the data cannot tell whether it falls at all."
    if law.exponent.low == 0 or math.isinf(law.exponent.high) or math.isinf(law.floor.low):
        return " An interval is open: the data cannot tell where it levels off."
    return ""

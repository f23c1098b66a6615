"""The page of a sweep: a figure by x and seed, differences within a seed, controls, curves, fits, the best point.

It is written from the records as report.md, report.html, report.json, drawings and tables; the same records give the
same bytes. Where the figures cannot tell (an interval that covers 0, one seed, an optimum at the edge of what was
tried), the page says so beside the number.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rung.compare.lineage import value_text
from rung.compare.reading import UNREADABLE
from rung.compare.scaling.effects import Series, all_series, amounts_of_data
from rung.compare.scaling.fit import Interval
from rung.compare.scaling.study import COMPONENTS, Study, collect
from rung.compare.student import upper_tail
from rung.errors import RunError
from rung.files import write_whole
from rung.report.blocks import Block, Bullets, Heading, Page, Paragraph, Picture, Spans, Table, bold, code, markdown
from rung.report.html import to_html
from rung.report.plot import Line, Plot, Scatter, Trace, scatter_svg, svg
from rung.runs.files import read_json, refused, write_json
from rung.runs.query import Run
from rung.text import one_line
from rung.units import count

SCHEMA = 1  # of report.json
ROUNDED = {"figure": ".4f", "difference": "+.4f", "exponent": ".3g"}  # every rounding on the page
_SMALL, _DUST = 1e-3, 1e-12  # below the one, four places show a digit at most; below the other lies what floats leave
_MOST_SE = 2.0  # standard errors that a control may lie from 0
MOST_DRIFT = 0.01  # of the amount of data, before it is said to change along with x
_MOST_CURVES = 6  # in one drawing: as many as there are colours
_MOST_NAMED = 12  # of a list in a sentence
_MOST_TICK = 8  # characters
_LOG_RATIO = 4  # from the smallest x to the largest: more is drawn on a logarithmic axis


def report(
    runs: Sequence[Run], out: Path, *, x: str | None = None, metric: str | None = None, name: str = "sweep"
) -> Path:
    """Writes the page of these runs into `out`, and returns the path of report.md."""
    study = collect(runs, x, metric, name)
    series = all_series(study)
    page = Page(one_line(name), [*_head(study, series), *_by_seed(study, series)])
    if study.is_of_amounts:
        page.blocks += [*_differences(study, series), *_data(study, series), *_control(study, series)]
    has_components = any(member.reading.groups for member in study.members)
    if not study.is_of_amounts or not has_components:
        page.blocks += _best(study, series)
    if has_components:
        page.blocks += _components(study, series)
    page.blocks += [*_positions(study, series), *_fits(study, series), *_runs(study, series)]
    texts = {**page.drawings, **_tables(study, series), "report.html": to_html(page), "report.md": markdown(page)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:  # files that an earlier report left here, by its own list
            before = [file for file in read_json(out / "report.json")["files"] if isinstance(file, str)]
        except UNREADABLE:
            before = []
        for file, text in texts.items():
            if (out / file).is_dir():
                message = f"{out / file} is a folder; name another folder for the report."
                raise RunError(message, code="file-exists")
            write_whole(out / file, text.encode())
        write_json(out / "report.json", {**_document(study, series), "files": sorted(texts)})
        for file in before:
            if file not in texts and "/" not in file and not file.startswith("."):
                (out / file).unlink(missing_ok=True)
    except OSError as error:
        raise refused(str(out / "report.md"), error) from error
    return out / "report.md"


# Numbers and names, as the page writes them


def _axis(study: Study) -> str:
    return "K, the number of components" if study.x == COMPONENTS else one_line(study.x)


def _short(study: Study) -> str:
    """The last part of the key, for the head of a column."""
    return "K" if study.x == COMPONENTS else one_line(study.x.rpartition(".")[2])


def _rounded(value: float, name: str = "figure") -> str:
    """With the rounding of that name; of small values, which it would take for 0, two digits."""
    is_small = _DUST < abs(value) < _SMALL
    return format(value, f"{'+' if '+' in ROUNDED[name] else ''}.2g" if is_small else ROUNDED[name])


def _move(value: float) -> str:
    return "-" if math.isnan(value) else _rounded(value, "difference")


def _ends(one: Interval, name: str = "difference") -> str:
    """The interval, with the rounding of that name; "-" where there is none."""
    return f"[{_rounded(one.low, name)}, {_rounded(one.high, name)}]" if one.is_known else "-"


def _estimate(one: Interval, name: str) -> str:
    """The value, and its interval where there is one."""
    return f"{_rounded(one.value, name)}{f' {_ends(one, name)}' if one.is_known else ''}"


def _rms(residuals: Sequence[Sequence[float]]) -> str:
    flat = [value for one in residuals for value in one]
    return _rounded(math.sqrt(fmean(value * value for value in flat)) if flat else 0.0)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "")


# The parts of the page


def _head(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    steps = sorted({member.reading.step for member in study.members if member.reading.step is not None})
    span = "" if not steps else f", at step {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "")
    how = "the saves named below" if study.is_of_split else "each run at its best eval"
    better = "lower" if study.is_lower_better else "higher"
    seeds, num = {member.seed for member in study.members}, len({value_text(m.at) for m in study.members})
    items: list[Spans] = [
        [bold("metric"), ": ", code(one_line(study.metric)), f", {how}{span}; {better} is better"],
        [bold("axis"), ": ", code(one_line(study.x)), f", {num} value{'s' if num > 1 else ''}"],
        [bold("runs"), f": {len(study.members)} count, {len(study.left_out)} left out; "
         f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"],
    ]  # fmt: skip
    if len(series) > 1:
        items.append([bold("series"), ": ", _listed([one.label or "(as set)" for one in series])])
    yield Bullets(items)
    if study.notes:
        yield Bullets([[note] for note in study.notes])
    if study.moves_along:
        names = ", ".join(map(one_line, study.moves_along))
        yield Paragraph([bold("More than one thing changes"), f": for each {_axis(study)} there is one value of "
                         f"{names}, so what follows from which cannot be told apart."])  # fmt: skip
    if study.left_out:
        yield Heading(2, ["left out"])
        yield Bullets([[bold(one_line(one.what)), f": {one_line(one.reason)}"] for one in study.left_out])
    if study.confounds:
        yield Heading(2, ["differs besides what was varied"])
        yield Paragraph([f"Against {study.members[0].run.id}; a difference below may be the work of these instead."])
        yield Bullets([[what, ": ", _listed(ids)] for what, ids in study.confounds.items()])


def _by_seed(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    yield Heading(2, [f"{one_line(study.metric)} by {'' if study.x == 'seed' else f'{_axis(study)} and '}seed"])
    for one in series:
        if one.label:
            yield Paragraph([bold(one.label)])
        rows: list[list[Spans | str]] = []
        for place in one.places:
            shown = []
            for member in (one.cell(place, seed) for seed in one.seeds):
                se = member.reading.figure.se if member is not None else None
                error = "" if se is None else f" ± {_rounded(se)}"
                shown.append("-" if member is None else f"{_rounded(member.value)}{error}")
            values = one.values(place)
            sd = _rounded(stdev(values)) if len(values) > 1 else "-"
            rows.append([value_text(place), *shown, _rounded(fmean(values)), sd])
        head = [_short(study), *(f"seed {seed}" for seed in one.seeds), "mean", "sd over seeds"]
        yield Table(head, rows, numeric=range(len(head)))
    if any(member.reading.figure.se is not None for member in study.members):
        yield Paragraph(["± is the standard error of the eval set, over documents or pieces, within one run."])
    if not study.is_numeric or len({member.x for member in study.members}) < 2:
        return

    traces = []
    for one in series:
        name = one.label or ("mean over seeds" if len(one.seeds) > 1 else f"seed {one.seeds[0]}")
        for seed in one.seeds if len(one.seeds) > 1 else ():
            mine = [m for place in one.places if (m := one.cell(place, seed)) is not None]
            traces.append(Trace(name, [m.x or 0.0 for m in mine], [m.value for m in mine], "faint"))
        xs = [one.at(place)[0].x or 0.0 for place in one.places]
        traces.append(Trace(name, xs, [fmean(one.values(place)) for place in one.places]))
    what = ", each seed and the mean" if any(len(one.seeds) > 1 for one in series) else ", one seed"
    yield _drawn("response", study, f"{study.name}: {study.metric}{what}", traces)


def _drawn(name: str, study: Study, title: str, traces: list[Trace], has_zero: bool = False) -> Picture:
    places = {}
    for member in study.members:
        text = value_text(member.at)
        if isinstance(member.at, int) and member.at >= 10_000:
            text = count(member.at)
        elif isinstance(member.at, float) and len(text) > _MOST_TICK:
            text = f"{member.at:.3g}"
        places[member.x or 0.0] = text
    is_log = min(places) > 0 and max(places) >= _LOG_RATIO * min(places)
    scatter = Scatter(title, _axis(study), traces, sorted(places.items()), is_log, has_zero)
    return Picture(f"{name}.svg", title, scatter_svg(scatter))


def _differences(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    with_deltas = [one for one in series if one.deltas]
    if not with_deltas:
        return
    against = list(dict.fromkeys(value_text(one.places[0]) for one in with_deltas))
    yield Heading(2, [f"difference against {_short(study)} = {' or '.join(against)}"])
    by_component = any(p.components for one in with_deltas for d in one.deltas for p in d.by_seed.values())
    within = " and over the components that both runs have" if by_component else ""
    yield Paragraph([f"Paired: two runs of one seed{within}, then the mean over seeds with Student's 95 % interval. "
                     "Unpaired: the difference of the plain means with Welch's interval, which carries all that the "
                     "seeds differ in anyway."])  # fmt: skip
    traces = []
    for one in with_deltas:
        if one.label:
            yield Paragraph([bold(one.label), f", against {value_text(one.places[0])}" if len(against) > 1 else ""])
        rows: list[list[Spans | str]] = []
        for delta in one.deltas:
            seeds = [_move(delta.by_seed[seed].difference) if seed in delta.by_seed else "-" for seed in one.seeds]
            num, moved = len(delta.by_seed), delta.paired.value
            if num == 0:
                words = "no pair: no seed has both runs, or they share no component"
            elif num == 1:
                errors = f"; {abs(moved) / delta.se:.1f} s.e. of the eval sets" if delta.se else ""
                words = f"one seed: no interval over seeds{errors}"
            elif delta.paired.covers_zero:
                words = f"cannot tell from 0 with {num} seeds"
            else:
                words = f"{'lower' if moved < 0 else 'higher'}, {num} seeds"
            rows.append([value_text(delta.at), _move(moved), _ends(delta.paired), words, *seeds,
                         _move(delta.unpaired.value), _ends(delta.unpaired)])  # fmt: skip
        head = [_short(study), "paired mean", "95 % interval", "in words", *(f"seed {seed}" for seed in one.seeds),
                "unpaired", "95 % interval"]  # fmt: skip
        yield Table(head, rows, [i for i, name in enumerate(head) if name != "in words"])
        alone = [delta for delta in one.deltas if not delta.paired.covers_zero]
        unsure = [value_text(delta.at) for delta in alone if delta.joint.covers_zero]
        if alone:
            told = f"{_short(study)} {', '.join(unsure)} cannot be told from 0" if unsure else "these still exclude 0"
            both = f"Wide enough for all {len(one.deltas)} at once, and for seeds as skewed as an exponential: {told}."
            yield Paragraph([f"Each interval is for one comparison, of seeds that vary normally. {both}"])
        if one.unpaired_seeds:
            yield Paragraph([f"No run at {value_text(one.places[0])}, so no paired difference: seed "
                             f"{', '.join(one.unpaired_seeds)}."])  # fmt: skip

        known = [delta for delta in one.deltas if delta.by_seed]
        name = one.label or "paired, 95 % interval"
        for delta in known:
            x, values = one.at(delta.at)[0].x or 0.0, [p.difference for p in delta.by_seed.values()]
            traces.append(Trace(name, [x] * len(values), values, "dots"))
        bars = [Interval(0.0, 0.0, 0.0)]  # the baseline itself
        bars += [d.paired if d.paired.is_known else Interval(*[d.paired.value] * 3) for d in known]
        xs = [one.at(place)[0].x or 0.0 for place in (one.places[0], *(delta.at for delta in known))]
        traces.append(Trace(name, xs, [b.value for b in bars], "line", [b.low for b in bars], [b.high for b in bars]))
    title = f"{study.name}: difference of {study.metric}, paired within a seed"
    yield _drawn("difference", study, title, traces, has_zero=True)


def _data(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    """Whether runs also differ in how much there is to learn from."""
    found = amounts_of_data(study)
    if found is None:
        return
    yield Heading(2, ["unique training tokens"])
    if len(amounts := {member.unique_tokens for member in study.members}) == 1:
        yield Paragraph([f"{value_text(int(amounts.pop() or 0))} in every run."])
        return
    rows: list[list[Spans | str]] = []
    for one in series:
        for place in one.places:
            tokens = [member.unique_tokens for member in one.at(place) if member.unique_tokens is not None]
            if tokens:
                label = [one.label] if len(series) > 1 else []
                rows.append([*label, value_text(place), *(value_text(int(t)) for t in (min(tokens), max(tokens)))])
    head = [*(["series"] if len(series) > 1 else []), _short(study), "least", "most"]
    yield Table(head, rows, numeric=range(len(head) - 3, len(head)))
    least, most = found
    if most > 0 and (most - least) / most > MOST_DRIFT and "token" not in study.x:
        yield Paragraph([bold(f"{_short(study)} and the amount of data change together"),
                         f": for one seed from {count(least)} to {count(most)} unique tokens, so a lower loss may be "
                         "that of more data. ", code("dataset.max_unique_tokens"), " holds them equal."])  # fmt: skip


def _control(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    controls = [one for one in series if one.is_control]
    if not controls:
        return
    yield Heading(2, ["control: shuffled labels"])
    items: list[Spans] = []
    for delta in (delta for one in controls for delta in one.deltas if delta.by_seed):
        num, word, se, chance = len(delta.by_seed), "no standard error", "", ""
        if delta.se is not None:
            is_within = abs(delta.paired.value) <= _MOST_SE * delta.se
            word = "within 2 s.e." if is_within else "not within 2 s.e."
            se = f", s.e. {_rounded(delta.se)} over {f'{num} seeds' if num > 1 else 'rows'}"
            if not is_within and num > 1:  # how often so few values pass two standard errors where nothing differs
                percent = 200 * upper_tail(_MOST_SE, num - 1)
                chance = f"; with {num} seeds chance alone does that in {percent:.0f} % of cases"
        items.append([f"{_short(study)} {value_text(delta.at)}: {_move(delta.paired.value)}{se}: ", bold(word), chance])
    if items:
        yield Bullets(items)
        yield Paragraph(["With labels dealt out at random a component means nothing: what is left of the difference "
                         "is not the work of components."])  # fmt: skip
    else:
        yield Paragraph([f"No seed of the control has two values of {_short(study)} yet."])


def _best(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    """The best point of each series, and whether it is one."""
    items: list[Spans] = []
    for one in series:
        found = one.best
        if found is None or one.is_control:
            continue
        seeds = f"mean of {found.num_seeds} seeds" if found.num_seeds > 1 else "one seed"
        beside = one.at(found.at)[0].beside
        text = "".join(f", {one_line(key)} = {value_text(value)}" for key, value in beside.items())
        text += f", {_rounded(found.mean)} ({seeds}). Next is {value_text(found.second)}"
        if found.difference is not None and found.difference.is_known:
            tells = "which is worse"
            if found.difference.covers_zero:
                tells = "which it cannot be told from"
            elif found.joint is not None and found.joint.covers_zero:
                tells = "which is worse as one comparison of seeds that vary normally, but not surely as the best of "
                tells += f"{len(one.places)}"
            text += f", {tells}: {_estimate(found.difference, 'difference')}. "
        else:
            text += "; one seed cannot tell the two apart. "
        if num := study.diverged[value_text(found.at)]:
            text += f"{num} run{'s' if num > 1 else ''} there diverged. "
        if found.is_edge:
            text += "It is at the edge of what was tried: the optimum may lie beyond it."
        elif study.is_numeric and len(one.places) > 2:
            text += "It is not at the edge of what was tried."
        label = f"{one.label}: " if one.label else ""
        items.append([label, bold(f"{one_line(study.x)} = {value_text(found.at)}"), text.rstrip()])
    if items:
        yield Heading(2, ["best"])
        yield Bullets(items)


def _components(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    yield Heading(2, ["by component"])
    for one in series:
        names = sorted({name for member in one.cells.values() for name in member.reading.groups})
        if one.label and names:
            yield Paragraph([bold(one.label)])
        rows: list[list[Spans | str]] = []
        for name in names:
            cells: list[Spans | str] = [one_line(name)]
            for place in one.places:
                values = [m.reading.groups[name].value for m in one.at(place) if name in m.reading.groups]
                cells.append(f"{_rounded(fmean(values))} ({len(values)})" if values else "-")
            rows.append(cells)
        if rows:
            head = ["component", *(f"{_short(study)} {value_text(place)}" for place in one.places)]
            yield Table(head, rows, numeric=range(1, len(head)))
    yield Paragraph(["The mean over the seeds that have the component, with their number."])


def _positions(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    """The loss by position in the context."""
    is_first = True
    for number, one in enumerate(series):
        found = one.positions
        if not found:
            continue
        if is_first:
            yield Heading(2, ["loss by position"])
            if any(any(member.reading.positions) for member in one.cells.values()):
                yield Paragraph(["On the components that a seed has at the smallest x, at every x."])
            is_first = False
        names = list(found)
        every = math.ceil(len(names) / _MOST_CURVES)
        shown = names if len(names) <= _MOST_CURVES else [*names[:-1:every], names[-1]][-_MOST_CURVES:]
        lines = [Line(f"{_short(study)} {name}", range(len(found[name][0])), found[name][0]) for name in shown]
        title = f"{study.name}: loss by position, mean over seeds{f', {one.label}' if one.label else ''}"
        yield Picture(f"positions{number or ''}.svg", title, svg(Plot(title, "position", lines)))
        if len(shown) < len(names):
            yield Paragraph([f"{len(shown)} of {len(names)} curves are drawn; all are in ", code("positions.csv"), "."])


def _fits(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    fits = [(one.label, one.fit) for one in series if one.fit is not None]
    if fits:
        yield Heading(2, ["fit"])
        yield Paragraph([f"Within a seed, {fits[0][1].of}: each seed has its own level, and what is fitted is how it "
                         "moves."])  # fmt: skip
    x = _short(study)
    for name, fit in fits:
        label, law = f"{name}: " if name else "", fit.power
        items: list[Spans] = []
        if fit.line is not None:
            over = f"{fit.line.num_seeds} seeds" if fit.line.num_seeds > 1 else f"{fit.num_points} points of one seed"
            level, slope = fit.line.intercept, fit.line.slope
            conclusion = f"Each doubling {'lowers' if slope.value < 0 else 'raises'} it."
            if not slope.is_known:
                conclusion = "Too few points for an interval: the data cannot tell whether there is a slope."
            elif slope.covers_zero:
                conclusion = "The interval covers 0: the data cannot tell whether there is a slope."
            found = f"a = {_estimate(level, 'figure')}, b = {_estimate(slope, 'difference')} over {over}"
            found += f"; residuals {_rms(fit.line.residuals)} (rms)"
            items.append([label, bold(f"a + b log2({x})"), f": {found}. {conclusion}"])
        if law is not None:
            conclusion = ""
            if law.gain.covers_zero:
                conclusion = " The interval of d covers 0: the data cannot tell whether it falls at all."
            elif law.exponent.low == 0 or math.isinf(law.exponent.high) or math.isinf(law.floor.low):
                conclusion = " An interval is open: the data cannot tell where it levels off."
            found = f"c = {_estimate(law.floor, 'figure')}, d = {_estimate(law.gain, 'figure')}, "
            found += f"e = {_estimate(law.exponent, 'exponent')}; residuals {_rms(law.residuals)} (rms)"
            items.append([label, bold(f"c + d ({x} / {law.first:g})^-e"), f": {found}.{conclusion}"])
        elif fit.why_no_power:
            items.append([label, bold(f"c + d {x}^-e"), f": not fitted: {fit.why_no_power}."])
        yield Bullets(items)


def _runs(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    has_series = any(member.series or member.is_control for member in study.members)
    rows: list[list[Spans | str]] = []
    for one in (member for each in series for member in each.cells.values()):
        figure, step = one.reading.figure, one.reading.step
        beside = [value_text(value) for value in one.beside.values()]
        rows.append([one_line(one.run.id), value_text(one.at), *beside, one.seed, *([one.label] if has_series else []),
                     value_text(figure.value), "-" if figure.se is None else value_text(figure.se),
                     "-" if step is None else str(step)])  # fmt: skip
    beside = [one_line(key.rpartition(".")[2]) for key in study.moves_along]
    head = ["run", _short(study), *beside, "seed", *(["series"] if has_series else []), one_line(study.metric), "s.e.",
            "step"]  # fmt: skip
    yield Heading(2, ["runs"])
    yield Table(head, rows, numeric=(*range(1, 3 + len(beside)), *range(len(head) - 3, len(head))))


# report.json and the tables: everything that the page shows, to all digits


def _document(study: Study, series: Sequence[Series]) -> dict[str, Any]:
    """What report.json holds."""

    def plain(one: Interval | None) -> dict[str, float | None] | None:
        """NaN, where there is no interval, as null."""
        return None if one is None else {k: None if math.isnan(value) else value for k, value in one._asdict().items()}

    runs = []
    for member in study.members:
        reading = member.reading
        runs.append({
            "run": member.run.id, "x": member.at, "seed": member.seed, "series": member.series,
            "is_control": member.is_control, "value": reading.figure.value, "se": reading.figure.se,
            "step": reading.step, "weights": reading.weights, "unique_tokens": member.unique_tokens,
            "beside": dict(member.beside),
            "components": {name: one._asdict() for name, one in reading.groups.items()},
            "rows": dict(reading.rows_of),
        })  # fmt: skip
    of_series = []
    for one in series:
        top, fit = one.best, one.fit
        straight, law = (None, None) if fit is None else (fit.line, fit.power)
        of_series.append({
            "series": one.label,
            "is_control": one.is_control,
            "x": one.places,
            "seeds": one.seeds,
            "seeds_without_baseline": one.unpaired_seeds,
            "differences": [
                {
                    "x": delta.at, "baseline": delta.baseline, "paired": plain(delta.paired),
                    "unpaired": plain(delta.unpaired), "joint": plain(delta.joint), "se": delta.se,
                    "by_seed": {seed: pair._asdict() for seed, pair in delta.by_seed.items()},
                }
                for delta in one.deltas
            ],
            "positions": {place: {"loss": loss, "seeds": num} for place, (loss, num) in one.positions.items()},
            "fit": None if fit is None else {
                "of": fit.of,
                "points": fit.num_points,
                "log2": None if straight is None else {
                    "a": plain(straight.intercept), "b": plain(straight.slope), "seeds": straight.num_seeds,
                    "residuals": straight.residuals,
                },
                "power": None if law is None else {
                    "c": plain(law.floor), "d": plain(law.gain), "e": plain(law.exponent), "first": law.first,
                    "residuals": law.residuals,
                },
                "no_power_because": fit.why_no_power,
            },
            "best": None if top is None else {
                **top._asdict(), "difference": plain(top.difference), "joint": plain(top.joint),
            },
        })  # fmt: skip
    data = amounts_of_data(study)
    return {
        "schema": SCHEMA,
        "name": study.name,
        "x": study.x,
        "metric": study.metric,
        "better": "lower" if study.is_lower_better else "higher",
        "runs": runs,
        "left_out": [one._asdict() for one in study.left_out],
        "differs_besides": [{"what": what, "runs": ids} for what, ids in study.confounds.items()],
        "moves_along": study.moves_along,
        "notes": study.notes,
        "unique_tokens": None if data is None else {"least": data[0], "most": data[1]},
        "series": of_series,
    }


def _tables(study: Study, series: Sequence[Series]) -> dict[str, str]:
    """File name -> CSV."""
    runs: list[list[Any]] = []
    runs.append(["run", "series", "x", "seed", "value", "se", "step", "unique_tokens", *study.moves_along])
    for one in study.members:
        figure = one.reading.figure
        runs.append([one.run.id, one.label, value_text(one.at), one.seed, figure.value, figure.se, one.reading.step,
                     one.unique_tokens, *map(value_text, one.beside.values())])  # fmt: skip
    differences: list[list[Any]] = [["series", "x", "baseline", "seed", "difference", "se", "components"]]
    positions: list[list[Any]] = [["series", "x", "position", "loss", "seeds"]]
    components: list[list[Any]] = [["run", "series", "x", "seed", "component", "loss", "se"]]
    for row in series:
        for delta in row.deltas:
            for seed, paired in delta.by_seed.items():
                differences.append([row.label, value_text(delta.at), value_text(delta.baseline), seed,
                                    paired.difference, paired.se, "; ".join(paired.components)])  # fmt: skip
        for place, (losses, num) in row.positions.items():
            positions += [[row.label, place, position, loss, num] for position, loss in enumerate(losses)]
        for one in row.cells.values():
            start = [one.run.id, row.label, value_text(one.at), one.seed]
            components += [[*start, name, figure.value, figure.se] for name, figure in one.reading.groups.items()]

    rows_by_file = {
        "runs.csv": runs, "differences.csv": differences, "components.csv": components, "positions.csv": positions,
    }  # fmt: skip
    found = {}
    for file, rows in rows_by_file.items():
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows(["" if value is None else value for value in row] for row in rows)
        if len(rows) > 1:
            found[file] = out.getvalue()
    return found

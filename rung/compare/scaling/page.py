"""The page of a sweep: a figure by x and seed, differences within a seed, controls, curves, fits, the best point.

Written from the records of the runs, as report.md, report.html, report.json, drawings and tables; the same records give
the same bytes. Who counts is decided by study, what the figures say by effects and fit.

The surprising thing: where the figures cannot tell, that is the sentence on the page. An interval that covers 0, one
seed, an optimum at the edge of what was tried: each is said in words beside the number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rung.compare.blocks import Block, Bullets, Heading, Page, Paragraph, Picture, Spans, Table, bold, code, markdown
from rung.compare.html import to_html
from rung.compare.lineage import value_text
from rung.compare.plot import Line, Plot
from rung.compare.plot import svg as plot_svg
from rung.compare.reading import UNREADABLE
from rung.compare.scaling.conclusions import best_blocks, fit_blocks
from rung.compare.scaling.effects import MOST_SE, Delta, Series, all_series, amounts_of_data, curves
from rung.compare.scaling.figures import document, tables
from rung.compare.scaling.fit import Interval
from rung.compare.scaling.scatter import Scatter, Trace
from rung.compare.scaling.scatter import svg as scatter_svg
from rung.compare.scaling.study import Study, collect
from rung.compare.scaling.wording import axis, ends, figure, move, short, tick, with_se
from rung.compare.student import upper_tail
from rung.errors import RunError
from rung.files import write_whole
from rung.runs.files import read_json, refused, write_json
from rung.runs.query import Run
from rung.text import one_line
from rung.units import count

MOST_DRIFT = 0.01  # of the amount of data, before it is said to change along with x
_MOST_CURVES = 6  # in one drawing: as many as there are colours
_MOST_NAMED = 12  # of a list in a sentence
_LOG_RATIO = 4  # from the smallest x to the largest: more is drawn on a logarithmic axis


def report(
    runs: Sequence[Run], out: Path, *, x: str | None = None, metric: str | None = None, name: str = "sweep"
) -> Path:
    """Writes the page of these runs into `out`, and returns the path of report.md."""
    study = collect(runs, x, metric, name)
    series = all_series(study)
    drawings: dict[str, str] = {}
    page = Page(one_line(name), list(_blocks(study, series, drawings)))
    files: dict[str, bytes] = {file: text.encode() for file, text in {**drawings, **tables(study, series)}.items()}
    files |= {"report.html": to_html(page).encode(), "report.md": markdown(page).encode()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        stale = [file for file in _written_before(out) if file not in files]
        for file, data in files.items():
            if (out / file).is_dir():
                raise RunError(f"{out / file} is a folder; name another folder for the report.")
            write_whole(out / file, data)
        write_json(out / "report.json", {**document(study, series), "files": sorted(files)})
        for file in stale:
            (out / file).unlink(missing_ok=True)
    except OSError as error:
        raise refused(str(out / "report.md"), error) from error
    return out / "report.md"


def _written_before(out: Path) -> list[str]:
    """Files that an earlier report left here, by its own list."""
    try:
        files = read_json(out / "report.json")["files"]
        return [file for file in files if isinstance(file, str) and "/" not in file and not file.startswith(".")]
    except UNREADABLE:
        return []


def _blocks(study: Study, series: Sequence[Series], drawings: dict[str, str]) -> Iterator[Block]:
    yield from _head(study, series)
    yield from _left_out(study)
    yield from _by_seed(study, series, drawings)
    if study.is_of_amounts:
        yield from _differences(study, series, drawings)
        yield from _data(study, series)
        yield from _control(study, series)
    if not study.is_of_amounts or not any(member.reading.groups for member in study.members):
        yield from best_blocks(study, series)
    yield from _components(study, series)
    yield from _curves(study, series, drawings)
    yield from fit_blocks(study, series)
    yield from _runs(study)


def _head(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    steps = sorted({member.reading.step for member in study.members if member.reading.step is not None})
    span = "" if not steps else f", at step {steps[0]}" + (f" to {steps[-1]}" if len(steps) > 1 else "")
    how = "the saves named below" if study.is_examined else "each run at its best eval"
    seeds, num = {member.seed for member in study.members}, len({value_text(m.at) for m in study.members})
    yield Bullets(
        [
            [bold("metric"), ": ", code(one_line(study.metric)), f", {how}{span}; "
             f"{'lower' if study.is_lower_better else 'higher'} is better"],
            [bold("axis"), ": ", code(one_line(study.x)), f", {num} value{'s' if num > 1 else ''}"],
            [bold("runs"), f": {len(study.members)} count, {len(study.left_out)} left out; "
             f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"],
            *([[bold("series"), ": ", *_listed([one.label or "(as set)" for one in series])]]
              if len(series) > 1 else []),
        ]
    )  # fmt: skip
    if study.notes:
        yield Bullets([[note] for note in study.notes])
    if study.moves_along:
        names = ", ".join(map(one_line, study.moves_along))
        yield Paragraph([bold("More than one thing changes"), f": for each {axis(study)} there is one value of "
                         f"{names}, so what follows from which cannot be told apart."])  # fmt: skip


def _listed(names: Sequence[str]) -> Spans:
    return [", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else "")]


def _left_out(study: Study) -> Iterator[Block]:
    if study.left_out:
        yield Heading(2, ["left out"])
        yield Bullets([[bold(one_line(one.what)), f": {one_line(one.reason)}"] for one in study.left_out])
    if study.confounds:
        yield Heading(2, ["differs besides what was varied"])
        yield Paragraph([f"Against {study.members[0].run.id}; a difference below may be the work of these instead."])
        yield Bullets([[one.what, ": ", *_listed(one.runs)] for one in study.confounds])


def _by_seed(study: Study, series: Sequence[Series], drawings: dict[str, str]) -> Iterator[Block]:
    yield Heading(2, [f"{one_line(study.metric)} by {'' if study.x == 'seed' else f'{axis(study)} and '}seed"])
    has_se = any(member.reading.figure.se is not None for member in study.members)
    for one in series:
        if one.label:
            yield Paragraph([bold(one.label)])
        rows: list[list[Spans | str]] = []
        for place in one.places:
            values = one.values(place)
            cells = [one.cells.get((value_text(place), seed)) for seed in one.seeds]
            shown = ["-" if cell is None else with_se(cell.value, cell.reading.figure.se) for cell in cells]
            sd = figure(stdev(values)) if len(values) > 1 else "-"
            rows.append([value_text(place), *shown, figure(fmean(values)), sd])
        head = [short(study), *(f"seed {seed}" for seed in one.seeds), "mean", "sd over seeds"]
        yield Table(head, rows, numeric=range(len(head)))
    if has_se:
        yield Paragraph(["± is the standard error of the eval set, over documents or pieces, within one run."])
    if study.is_numeric and len({member.x for member in study.members}) > 1:
        yield _drawn(drawings, "response", _response(study, series))


def _response(study: Study, series: Sequence[Series]) -> Scatter:
    traces = []
    for one in series:
        name = one.label or ("mean over seeds" if len(one.seeds) > 1 else f"seed {one.seeds[0]}")
        for seed in one.seeds if len(one.seeds) > 1 else ():
            mine = [m for place in one.places if (m := one.cells.get((value_text(place), seed))) is not None]
            traces.append(Trace(name, [m.x or 0.0 for m in mine], [m.value for m in mine], "faint"))
        places = [(one.at(place)[0].x or 0.0, fmean(one.values(place))) for place in one.places]
        traces.append(Trace(name, [x for x, _ in places], [y for _, y in places]))
    what = ", each seed and the mean" if any(len(one.seeds) > 1 for one in series) else ", one seed"
    return _scatter(study, f"{study.name}: {study.metric}{what}", traces)


def _scatter(study: Study, title: str, traces: list[Trace]) -> Scatter:
    places = {member.x or 0.0: tick(member.at) for member in study.members}
    is_log = min(places) > 0 and max(places) >= _LOG_RATIO * min(places)
    return Scatter(title, axis(study), traces, sorted(places.items()), is_log)


def _differences(study: Study, series: Sequence[Series], drawings: dict[str, str]) -> Iterator[Block]:
    told = [one for one in series if one.deltas]
    if not told:
        return
    against = list(dict.fromkeys(value_text(one.places[0]) for one in told))
    yield Heading(2, [f"difference against {short(study)} = {' or '.join(against)}"])
    by_component = any(p.components for one in told for d in one.deltas for p in d.by_seed.values())
    within = " and over the components that both runs have" if by_component else ""
    yield Paragraph([f"Paired: two runs of one seed{within}, then the mean over seeds with Student's 95 % interval. "
                     "Unpaired: the difference of the plain means with Welch's interval, which carries all that the "
                     "seeds differ in anyway."])  # fmt: skip
    for one in told:
        if one.label:
            yield Paragraph([bold(one.label), f", against {value_text(one.places[0])}" if len(against) > 1 else ""])
        head = [short(study), "paired mean", "95 % interval", "in words", *(f"seed {seed}" for seed in one.seeds),
                "unpaired", "95 % interval"]  # fmt: skip
        numeric = [i for i, name in enumerate(head) if name != "in words"]
        yield Table(head, [_delta_row(one, delta) for delta in one.deltas], numeric)
        if one.unpaired_seeds:
            yield Paragraph([f"No run at {value_text(one.places[0])}, so no paired difference: seed "
                             f"{', '.join(one.unpaired_seeds)}."])  # fmt: skip
    traces = []
    for one in told:
        known = [delta for delta in one.deltas if delta.by_seed]
        name = one.label or "paired, 95 % interval"
        for delta in known:
            x, values = one.at(delta.at)[0].x or 0.0, [p.difference for p in delta.by_seed.values()]
            traces.append(Trace(name, [x] * len(values), values, "dots"))
        bars = [Interval(0.0, 0.0, 0.0)]  # the baseline itself
        bars += [d.paired if d.paired.is_known else Interval(*[d.paired.value] * 3) for d in known]
        xs = [one.at(place)[0].x or 0.0 for place in (one.places[0], *(delta.at for delta in known))]
        traces.append(Trace(name, xs, [b.value for b in bars], "line", [b.low for b in bars], [b.high for b in bars]))
    if any(trace.x for trace in traces):
        drawing = _scatter(study, f"{study.name}: difference of {study.metric}, paired within a seed", traces)
        drawing.has_zero = True
        yield _drawn(drawings, "difference", drawing)


def _delta_row(series: Series, delta: Delta) -> list[Spans | str]:
    seeds = [move(delta.by_seed[seed].difference) if seed in delta.by_seed else "-" for seed in series.seeds]
    return [value_text(delta.at), move(delta.paired.value), ends(delta.paired), _verdict(delta), *seeds,
            move(delta.unpaired.value), ends(delta.unpaired)]  # fmt: skip


def _verdict(delta: Delta) -> str:
    num = len(delta.by_seed)
    if num == 0:
        return "no pair: no seed has both runs, or they share no component"
    if num == 1:
        rows = f"; {abs(delta.paired.value) / delta.se:.1f} s.e. of the eval sets" if delta.se else ""
        return f"one seed: no interval over seeds{rows}"
    if delta.paired.covers_zero:
        return f"cannot tell from 0 with {num} seeds"
    return f"{'lower' if delta.paired.value < 0 else 'higher'}, {num} seeds"


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
    head = [*(["series"] if len(series) > 1 else []), short(study), "least", "most"]
    yield Table(head, rows, numeric=range(len(head) - 3, len(head)))
    least, most = found
    is_meant = "token" in study.x
    if most > 0 and (most - least) / most > MOST_DRIFT and not is_meant:
        yield Paragraph([bold(f"{short(study)} and the amount of data change together"),
                         f": for one seed from {count(least)} to {count(most)} unique tokens, so a lower loss may be "
                         "that of more data. ", code("dataset.max_unique_tokens"), " holds them equal."])  # fmt: skip


def _control(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    controls = [one for one in series if one.is_control]
    if not controls:
        return
    yield Heading(2, ["control: shuffled labels"])
    items: list[Spans] = []
    for one in controls:
        for delta in one.deltas:
            if not delta.by_seed:
                continue
            within = delta.is_within_noise
            word = "no standard error" if within is None else "within 2 s.e." if within else "not within 2 s.e."
            num = len(delta.by_seed)
            se = "" if delta.se is None else f", s.e. {figure(delta.se)} over {f'{num} seeds' if num > 1 else 'rows'}"
            chance = (
                f"; with {num} seeds chance alone does that in {_chance(num)}" if within is False and num > 1 else ""
            )
            told = f"{short(study)} {value_text(delta.at)}: {move(delta.paired.value)}{se}: "
            items.append([told, bold(word), chance])
    if items:
        yield Bullets(items)
        yield Paragraph(["With labels dealt out at random a component means nothing: what is left of the difference "
                         "is not the work of components."])  # fmt: skip
    else:
        yield Paragraph([f"No seed of the control has two values of {short(study)} yet."])


def _chance(num_seeds: int) -> str:
    """How often two standard errors of so few values are passed where nothing differs."""
    return f"{200 * upper_tail(MOST_SE, num_seeds - 1):.0f} % of cases"


def _components(study: Study, series: Sequence[Series]) -> Iterator[Block]:
    told = [one for one in series if any(member.reading.groups for member in one.cells.values())]
    if not told:
        return
    yield Heading(2, ["by component"])
    for one in told:
        if one.label:
            yield Paragraph([bold(one.label)])
        names = sorted({name for member in one.cells.values() for name in member.reading.groups})
        head = ["component", *(f"{short(study)} {value_text(place)}" for place in one.places)]
        rows = [[one_line(name), *(_of_component(one, place, name) for place in one.places)] for name in names]
        yield Table(head, rows, numeric=range(1, len(head)))
    yield Paragraph(["The mean over the seeds that have the component, with their number."])


def _of_component(series: Series, place: Any, name: str) -> str:
    values = [m.reading.groups[name].value for m in series.at(place) if name in m.reading.groups]
    return f"{figure(fmean(values))} ({len(values)})" if values else "-"


def _curves(study: Study, series: Sequence[Series], drawings: dict[str, str]) -> Iterator[Block]:
    """The loss by position in the context."""
    is_first = True
    for number, one in enumerate(series):
        found = curves(one)
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
        lines = [Line(f"{short(study)} {name}", range(len(found[name][0])), found[name][0]) for name in shown]
        title = f"{study.name}: loss by position, mean over seeds{f', {one.label}' if one.label else ''}"
        file = f"positions{number or ''}.svg"
        drawings[file] = plot_svg(Plot(title, "position", lines))
        yield Picture(file, title, drawings[file])
        if len(shown) < len(names):
            yield Paragraph([f"{len(shown)} of {len(names)} curves are drawn; all are in ", code("positions.csv"), "."])


def _runs(study: Study) -> Iterator[Block]:
    yield Heading(2, ["runs"])
    has_series = any(member.series or member.is_control for member in study.members)
    rows: list[list[Spans | str]] = []
    for label, members in study.series().items():
        for one in members:
            figure, step = one.reading.figure, one.reading.step
            beside = [value_text(value) for value in one.beside.values()]
            rows.append([one_line(one.run.id), value_text(one.at), *beside, one.seed, *([label] if has_series else []),
                         value_text(figure.value), "-" if figure.se is None else value_text(figure.se),
                         "-" if step is None else str(step)])  # fmt: skip
    beside = [one_line(key.rpartition(".")[2]) for key in study.moves_along]
    head = ["run", short(study), *beside, "seed", *(["series"] if has_series else []), one_line(study.metric), "s.e.",
            "step"]  # fmt: skip
    yield Table(head, rows, numeric=(*range(1, 3 + len(beside)), *range(len(head) - 3, len(head))))


def _drawn(drawings: dict[str, str], name: str, scatter: Scatter) -> Picture:
    drawings[f"{name}.svg"] = scatter_svg(scatter)
    return Picture(f"{name}.svg", scatter.title, drawings[f"{name}.svg"])

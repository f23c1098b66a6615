"""The figures of a study as plain data and as CSV: everything that its page shows, to all digits."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rung.compare.lineage import value_text
from rung.compare.scaling.effects import Best, Delta, Fits, Series, amounts_of_data, best, curves, fits
from rung.compare.scaling.fit import Interval
from rung.compare.scaling.study import Member, Study, label_of

SCHEMA = 1


def document(study: Study, series: Sequence[Series]) -> dict[str, Any]:
    """What report.json holds."""
    data = amounts_of_data(study)
    return {
        "schema": SCHEMA,
        "name": study.name,
        "x": study.x,
        "metric": study.metric,
        "better": "lower" if study.is_lower_better else "higher",
        "runs": [_run(member) for member in study.members],
        "left_out": [one._asdict() for one in study.left_out],
        "differs_besides": [one._asdict() for one in study.confounds],
        "moves_along": study.moves_along,
        "notes": study.notes,
        "unique_tokens": None if data is None else {"least": data[0], "most": data[1]},
        "series": [_series(study, one) for one in series],
    }


def _run(member: Member) -> dict[str, Any]:
    reading = member.reading
    return {
        "run": member.run.id,
        "x": member.at,
        "seed": member.seed,
        "series": member.series,
        "is_control": member.is_control,
        "value": reading.figure.value,
        "se": reading.figure.se,
        "step": reading.step,
        "weights": reading.weights,
        "unique_tokens": member.unique_tokens,
        "beside": dict(member.beside),
        "components": {name: one._asdict() for name, one in reading.groups.items()},
        "rows": dict(reading.rows_of),
    }


def _series(study: Study, series: Series) -> dict[str, Any]:
    return {
        "series": series.label,
        "is_control": series.is_control,
        "x": series.places,
        "seeds": series.seeds,
        "seeds_without_baseline": series.unpaired_seeds,
        "differences": [_delta(one) for one in series.deltas],
        "positions": {place: {"loss": loss, "seeds": num} for place, (loss, num) in curves(series).items()},
        "fit": _fits(fits(study, series)),
        "best": _best(best(study, series)),
    }


def _delta(delta: Delta) -> dict[str, Any]:
    by_seed = {seed: one._asdict() for seed, one in delta.by_seed.items()}
    words = {"paired": interval(delta.paired), "unpaired": interval(delta.unpaired)}
    return {"x": delta.at, "baseline": delta.baseline, **words, "se": delta.se, "by_seed": by_seed}


def _fits(found: Fits | None) -> dict[str, Any] | None:
    if found is None:
        return None
    law, straight = found.power, found.line
    return {
        "of": found.of,
        "points": found.num_points,
        "log2": None if straight is None else {
            "a": interval(straight.intercept), "b": interval(straight.slope), "seeds": straight.num_seeds,
            "residuals": straight.residuals,
        },
        "power": None if law is None else {
            "c": interval(law.floor), "d": interval(law.gain), "e": interval(law.exponent), "first": law.first,
            "residuals": law.residuals,
        },
        "no_power_because": found.why_no_power,
    }  # fmt: skip


def _best(found: Best | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {**found._asdict(), "difference": None if found.difference is None else interval(found.difference)}


def interval(one: Interval) -> dict[str, float | None]:
    """NaN, where there is no interval, as null."""
    return {name: None if math.isnan(value) else value for name, value in one._asdict().items()}


def tables(study: Study, series: Sequence[Series]) -> dict[str, str]:
    """File name -> CSV."""
    head = ["run", "series", "x", "seed", "value", "se", "step", "unique_tokens", *study.moves_along]
    found = {"runs.csv": _csv(head, _run_rows(study))}
    head = ["series", "x", "baseline", "seed", "difference", "se", "components"]
    found["differences.csv"] = _csv(head, _delta_rows(series))
    found["components.csv"] = _csv(["run", "series", "x", "seed", "component", "loss", "se"], _component_rows(study))
    found["positions.csv"] = _csv(["series", "x", "position", "loss", "seeds"], _position_rows(series))
    return {name: text for name, text in found.items() if text.count("\n") > 1}


def _run_rows(study: Study) -> Iterable[list[Any]]:
    for one in study.members:
        figure = one.reading.figure
        yield [one.run.id, label_of(one), value_text(one.at), one.seed, figure.value, figure.se, one.reading.step,
               one.unique_tokens, *map(value_text, one.beside.values())]  # fmt: skip


def _delta_rows(series: Sequence[Series]) -> Iterable[list[Any]]:
    for one in series:
        for delta in one.deltas:
            for seed, paired in delta.by_seed.items():
                yield [one.label, value_text(delta.at), value_text(delta.baseline), seed, paired.difference, paired.se,
                       "; ".join(paired.components)]  # fmt: skip


def _component_rows(study: Study) -> Iterable[list[Any]]:
    for label, members in study.series().items():
        for one in members:
            for name, figure in one.reading.groups.items():
                yield [one.run.id, label, value_text(one.at), one.seed, name, figure.value, figure.se]


def _position_rows(series: Sequence[Series]) -> Iterable[list[Any]]:
    for one in series:
        for place, (losses, num) in curves(one).items():
            for position, loss in enumerate(losses):
                yield [one.label, place, position, loss, num]


def _csv(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(["" if value is None else value for value in row] for row in rows)
    return out.getvalue()

"""The figures of a study as plain data and as CSV: everything that its page shows, to all digits."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from rung.compare.lineage import value_text
from rung.compare.scaling.effects import Fits, Series, amounts_of_data, best, fits, position_curves
from rung.compare.scaling.fit import Interval
from rung.compare.scaling.study import Study

SCHEMA = 1


def document(study: Study, series: Sequence[Series]) -> dict[str, Any]:
    """What report.json holds."""
    data = amounts_of_data(study)
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
    return {
        "schema": SCHEMA,
        "name": study.name,
        "x": study.x,
        "metric": study.metric,
        "better": "lower" if study.is_lower_better else "higher",
        "runs": runs,
        "left_out": [one._asdict() for one in study.left_out],
        "differs_besides": [one._asdict() for one in study.confounds],
        "moves_along": study.moves_along,
        "notes": study.notes,
        "unique_tokens": None if data is None else {"least": data[0], "most": data[1]},
        "series": [_series(study, one) for one in series],
    }


def _series(study: Study, series: Series) -> dict[str, Any]:
    differences = []
    for delta in series.deltas:
        by_seed = {seed: one._asdict() for seed, one in delta.by_seed.items()}
        intervals = {"paired": _interval(delta.paired), "unpaired": _interval(delta.unpaired)}
        differences.append({"x": delta.at, "baseline": delta.baseline, **intervals, "se": delta.se, "by_seed": by_seed})
    top = best(study, series)
    curves = position_curves(series)
    return {
        "series": series.label,
        "is_control": series.is_control,
        "x": series.places,
        "seeds": series.seeds,
        "seeds_without_baseline": series.unpaired_seeds,
        "differences": differences,
        "positions": {place: {"loss": loss, "seeds": num} for place, (loss, num) in curves.items()},
        "fit": _fits(fits(study, series)),
        "best": None if top is None else {**top._asdict(), "difference": _interval(top.difference)},
    }


def _fits(found: Fits | None) -> dict[str, Any] | None:
    if found is None:
        return None
    law, straight = found.power, found.line
    return {
        "of": found.of,
        "points": found.num_points,
        "log2": None if straight is None else {
            "a": _interval(straight.intercept), "b": _interval(straight.slope), "seeds": straight.num_seeds,
            "residuals": straight.residuals,
        },
        "power": None if law is None else {
            "c": _interval(law.floor), "d": _interval(law.gain), "e": _interval(law.exponent), "first": law.first,
            "residuals": law.residuals,
        },
        "no_power_because": found.why_no_power,
    }  # fmt: skip


def _interval(one: Interval | None) -> dict[str, float | None] | None:
    """NaN, where there is no interval, as null."""
    return None if one is None else {k: None if math.isnan(value) else value for k, value in one._asdict().items()}


def tables(study: Study, series: Sequence[Series]) -> dict[str, str]:
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
        for place, (losses, num) in position_curves(row).items():
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

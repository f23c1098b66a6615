"""Prints how far every case is from the limit that decides it.

    python -m tests.cases.margins [--seeds 5] [names]    only the cases whose rule or name has one of the names

Sick and healthy are the values nearest to the limit over the seeds, with the spread (largest less smallest) of what is
bounded. A margin is in doublings of the limit, or in spreads of a bounded value; below 1 it is too small. The spreads
that cases state were measured with --seeds 20: one that is smaller than what is seen is marked with !. Where another
sign decides, a bounded one is not seen here, and its stated spread is a guess.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.cases.case import Ask, Case
from tests.cases.catalog import cases
from tests.cases.statistics import ENOUGH, FACT, Reading

ROW = "{:<46} {:<44} {:>9} {:>16} {:>16} {:>7}"


def readings(case: Case, ask: Ask, num_seeds: int, is_sick: bool) -> list[Reading]:
    found = []
    for seed in range(1, num_seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            reading = case.reading(ask(Path(folder), seed), is_sick)
        assert reading is not None
        found.append(reading)
    return sorted(found, key=lambda reading: reading.margin if is_sick else -reading.margin)


def line(case: Case, num_seeds: int) -> str:
    name = f"{case.rule} {case.name}"
    if case.statistic is FACT:
        return ROW.format(name, "a fact", "", "", "", "")
    both = [readings(case, ask, num_seeds, is_sick) for is_sick, ask in ((True, case.sick), (False, case.healthy))]
    sick, healthy = both[0][0], both[1][0]
    margin = min(sick.margin, -healthy.margin)
    shown = [f"{some[0].value:.4g}{_spread(some, some is both[0])}" for some in both]
    limit = f"{sick.limit:.4g}" + (f"/{healthy.limit:.4g}" if healthy.limit != sick.limit else "")
    what = sick.what if sick.what == healthy.what else f"{sick.what} / {healthy.what}"
    mark = "" if margin >= ENOUGH else "  too small"
    return ROW.format(name, what, limit, *shown, "inf" if math.isinf(margin) else f"{margin:.2f}") + mark


def _spread(some: Sequence[Reading], is_sick: bool) -> str:
    if some[0].spread is None:
        return ""
    stated = some[0].spread[not is_sick]
    values = [reading.value for reading in some if reading.what == some[0].what]
    seen = max(values) - min(values)
    return f" ±{seen:.2g}" + ("!" if seen > stated else "")


def main(names: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cases.margins")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args(names)
    torch.set_num_threads(1)
    print(ROW.format("case", "statistic", "limit", "sick", "healthy", "margin"))  # noqa: T201
    for case in cases():
        if not args.names or any(name in f"{case.rule} {case.name}" for name in args.names):
            print(line(case, args.seeds), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])

"""A closer look at a fixed set than its average: the loss by group of rows and by position, with standard errors.

Losses are the terms of the one loss, in the precision of training, summed in float64. A standard error is that of a
ratio of sums over clusters, the documents that rows were cut from: targets of one row and rows of one document are not
independent, so that all of them together count as one draw.

The one surprising thing is the control: the same losses with the labels of the clusters dealt out at random, many
times. What is left of the spread between groups is what chance alone makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from rung.data.prefetch import to_device
from rung.engine.build import Setup
from rung.engine.evaluate import EVAL_STEP, eval_mode
from rung.engine.step import seed_torch
from rung.recipe import Draw, Recipe, Report, Stream, key_of


def can_examine(recipe: Recipe) -> bool:
    return type(recipe).target_losses is not Recipe.target_losses


def examine(setup: Setup, model: nn.Module, name: str, stream: Stream, report: Report | None = None) -> dict[str, Any]:
    """Figures of one eval set, as plain data."""
    rows = np.arange(stream.num_rows)
    clusters = stream.cluster_of(rows)
    order = np.argsort(clusters, kind="stable")  # so that a cluster is done with before the next one begins
    tally = Tally(len(stream.groups))
    size = setup.cfg.data.batch_size
    with eval_mode(model):
        for start in range(0, len(rows), size):
            places = order[start : start + size]
            if report is not None:
                report(f"evaluating {name}", start, len(rows))
            tally.add(*_losses(setup, model, stream, places), clusters[places], stream.group_of(places))
    if report is not None:
        report(f"evaluating {name}", len(rows), len(rows))
    return tally.figures(stream.groups)


def _losses(setup: Setup, model: nn.Module, stream: Stream, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, positions) float64, both. The draw is that of an eval at these places: see Evaluator."""
    draw = Draw(setup.cfg.seed, EVAL_STEP, places)
    batch, _ = to_device(stream.gather(places, draw), setup.world.device)
    seed_torch("eval", draw)
    with setup.precision.autocast():
        losses, weights = setup.recipe.target_losses(model, batch, draw)
    return losses.double().cpu().numpy(), weights.double().cpu().numpy()


class Tally:
    """Sums by cluster, and moments of them by group and position; clusters must come one after the other."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._clusters: list[tuple[float, float, int, int]] = []  # sum, count, group, rows
        self._moments: np.ndarray | None = None  # (groups + none, positions, moments)
        self._open: tuple[int, int, int, np.ndarray, np.ndarray] | None = None  # the cluster that may have more rows

    def add(self, losses: np.ndarray, weights: np.ndarray, clusters: np.ndarray, groups: np.ndarray) -> None:
        if self._moments is None:
            self._moments = np.zeros((self._num_groups + 1, losses.shape[1], NUM_MOMENTS))
        firsts = np.flatnonzero(np.r_[True, clusters[1:] != clusters[:-1]])
        sums, counts = np.add.reduceat(losses, firsts), np.add.reduceat(weights, firsts)
        num_rows = np.diff(np.r_[firsts, len(clusters)])
        for i, first in enumerate(firsts):
            self._extend(int(clusters[first]), int(groups[first]), int(num_rows[i]), sums[i], counts[i])

    def _extend(self, cluster: int, group: int, num_rows: int, losses: np.ndarray, weights: np.ndarray) -> None:
        if self._open is not None and self._open[0] == cluster:
            _, group, before, sums, counts = self._open
            num_rows, losses, weights = before + num_rows, sums + losses, counts + weights
        else:
            self._close()
        self._open = (cluster, group, num_rows, losses, weights)

    def _close(self) -> None:
        if self._open is None or self._moments is None:
            return
        _, group, num_rows, losses, weights = self._open
        self._clusters.append((float(losses.sum()), float(weights.sum()), group, num_rows))
        self._moments[group] += moments_of(losses, weights)  # those of no group come last, which is -1
        self._open = None

    def figures(self, names: Sequence[str]) -> dict[str, Any]:
        self._close()
        assert self._moments is not None, "a stream without rows"
        table = np.array(self._clusters)
        sums, groups = table[:, [0, 1, 3]], table[:, 2].astype(int)
        result = _of_clusters(sums)
        result["positions"] = _curve(self._moments.sum(0))
        if not names:
            return result
        result["groups"] = {
            name: {**_of_clusters(sums[groups == i]), "positions": _curve(self._moments[i])}
            for i, name in enumerate(names)
        }
        result["mean_of_groups"] = _mean_of([one for one in result["groups"].values() if one["loss"] is not None])
        result["control"] = _control(moments_of(sums[:, 0], sums[:, 1]), groups, len(names))
        return result


NUM_MOMENTS = 6
NUM_DEALS = 99  # of labels at random: the smallest share of chance that they can tell is 1 in 100


def moments_of(losses: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """What a ratio of sums and its error need, to be added up over clusters, on a new last axis."""
    return np.stack([losses, weights, losses**2, losses * weights, weights**2, weights > 0], axis=-1)


def ratio(moments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means and their standard errors; NaN where nothing was counted, an error also where only one cluster has any."""
    loss, weight, squared, crossed, weight_squared, num_clusters = np.moveaxis(moments, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = loss / weight
        residuals = np.maximum(squared - 2 * mean * crossed + mean**2 * weight_squared, 0.0)
        scale = np.where(num_clusters > 1, num_clusters / (num_clusters - 1), np.nan)
        return mean, np.sqrt(residuals * scale) / weight


def _of_clusters(sums: np.ndarray) -> dict[str, Any]:
    """Figures of clusters with a sum, a count and a number of rows each."""
    mean, error = ratio(moments_of(sums[:, 0], sums[:, 1]).sum(0))
    return {
        "loss": _plain(mean),
        "se": _plain(error),
        "perplexity": _plain(np.exp(np.minimum(mean, 700.0))),
        "targets": float(sums[:, 1].sum()),
        "rows": int(sums[:, 2].sum()),
        "clusters": len(sums),
    }


def _curve(moments: np.ndarray) -> dict[str, list[Any]]:
    mean, error = ratio(moments)
    return {
        "loss": [_plain(value) for value in mean],
        "se": [_plain(value) for value in error],
        "targets": moments[:, 1].tolist(),
    }


def _mean_of(groups: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Each group with the same weight."""
    errors = [one["se"] for one in groups]
    is_known = bool(groups) and None not in errors
    return {
        "loss": sum(one["loss"] for one in groups) / len(groups) if groups else None,
        "se": math.sqrt(sum(error**2 for error in errors)) / len(groups) if is_known else None,
    }


def _control(moments: np.ndarray, groups: np.ndarray, num_groups: int) -> dict[str, Any]:
    """How far groups lie apart, and how far with labels at random: the median of many deals, since one may be odd."""
    moments, groups = moments[groups >= 0], groups[groups >= 0]
    seen = _spread(moments, groups, num_groups)
    numbers = np.random.default_rng(key_of("control", len(groups)))
    dealt = [_spread(moments, numbers.permutation(groups), num_groups) for _ in range(NUM_DEALS)]
    known = [one for one in dealt if one["chi2"] is not None]
    if seen["chi2"] is None or not known:
        return {"labels": seen, "shuffled": dealt[0], "deals": 0, "as_far": None}
    middle = {name: float(np.median([one[name] for one in known])) for name in ("spread", "largest_z", "chi2")}
    as_far = sum(one["chi2"] >= seen["chi2"] for one in known)
    return {"labels": seen, "shuffled": {**middle, "df": seen["df"]}, "deals": len(known), "as_far": as_far}


def _spread(moments: np.ndarray, groups: np.ndarray, num_groups: int) -> dict[str, Any]:
    """How far groups lie apart, in nats and in standard errors; chi2 is about df where labels mean nothing."""
    by_group = np.stack([np.bincount(groups, column, num_groups) for column in moments.T], axis=-1)
    mean, error = ratio(by_group)
    is_known = np.isfinite(mean) & (error > 0)
    mean, error = mean[is_known], error[is_known]
    if len(mean) < 2:
        return {"spread": None, "largest_z": None, "chi2": None, "df": max(0, len(mean) - 1)}
    z = (mean - np.average(mean, weights=error**-2)) / error
    return {
        "spread": float(np.ptp(mean)),
        "largest_z": float(np.abs(z).max()),
        "chi2": float((z**2).sum()),
        "df": len(z) - 1,
    }


def _plain(value: Any) -> float | None:
    """JSON knows no NaN."""
    return float(value) if math.isfinite(value) else None

"""The loss on a fixed set by group of rows and by position, with standard errors.

Losses are the terms of the one loss, in the precision of training, summed in float64. Standard errors are clustered by
document, since targets of one row and rows of one document are not independent. As a control, the same losses are
grouped with the labels of the documents shuffled, many times: that spread between groups is chance alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
from torch import nn

from rung.engine.build import Setup
from rung.engine.evaluate import eval_mode
from rung.engine.step import Sums
from rung.errors import RecipeError
from rung.random import Draw, key_of
from rung.recipe import Batch, Loss, Part, Report, Stream


def examine(
    setup: Setup, model: nn.Module, name: str, stream: Stream, report: Report = lambda *progress: None
) -> dict[str, Any] | None:
    """Figures of one eval set, as plain data; None where the loss does not give the losses of single targets.

    Of the run's own model also the `parts` of the loss and the measures, over the same rows.
    """
    is_own = model is setup.state.model
    loss = setup.state.objectives[0].plain_loss if is_own else setup.recipe.objectives(model)[0].loss

    def measured_loss(batch: Batch, draw: Draw) -> tuple[Loss, Mapping[str, Part]]:
        return loss(batch, draw), setup.recipe.measure(model, batch, draw) if is_own else {}

    rows, size = np.arange(stream.num_rows), setup.evaluator.batch_size
    clusters = stream.cluster_of(rows)
    order = np.argsort(clusters, kind="stable")  # so that a cluster is done with before the next one begins
    places = [order[start : start + size] for start in range(0, len(rows), size)]
    tally: Tally | None = None
    sums = Sums(setup.world.device)
    report(f"evaluating {name}", 0, len(rows))
    with eval_mode(model), closing(setup.evaluator.forward(stream, rows, places, measured_loss)) as results:
        for number, (some, (summed, measured)) in enumerate(zip(places, results)):
            targets = summed.targets
            if targets is None:
                return None
            tally = tally or Tally(len(stream.groups), targets.names)
            losses, weights = (term.double().cpu().numpy() for term in targets[:2])
            tally.add(losses, weights, clusters[some], stream.group_of(some))
            sums.add(summed, measured)
            report(f"evaluating {name}", min((number + 1) * size, len(rows)), len(rows))
    assert tally is not None  # a stream has rows
    figures = tally.figures(stream.groups)
    if is_own:
        packed = zip(sums.names, sums.packed(sums.names).tolist(), strict=True)
        figures["parts"] = {part: total / count for part, (total, count) in packed if count and part != "loss"}
    return figures


class Tally:
    """Sums by cluster, and moments of them by group and position; clusters must come one after the other.

    Targets have further axes where a position holds several, such as codebooks: they are added up in the curves of the
    whole and of groups, and have curves of their own by `parts`, the names of what they count.
    """

    def __init__(self, num_groups: int, parts: Sequence[str] = ()) -> None:
        self._num_groups, self._names, self._has_parts = num_groups, parts, False
        self._clusters: list[tuple[float, float, int, int]] = []  # sum, count, group, rows
        self._moments = np.zeros(0)  # (groups + none, positions, moments), from the first rows on
        self._parts = np.zeros(0)  # (parts, moments) of clusters
        self._part_positions = np.zeros(0)  # (parts, positions, moments)
        self._open: tuple[int, int, int, np.ndarray, np.ndarray] | None = None  # the cluster that may have more rows

    def add(self, losses: np.ndarray, weights: np.ndarray, clusters: np.ndarray, groups: np.ndarray) -> None:
        self._has_parts = losses.ndim > 2
        losses, weights = (x.reshape(len(x), x.shape[1] if x.ndim > 1 else 1, -1) for x in (losses, weights))
        if not self._moments.size:
            num_positions, num_parts = losses.shape[1:]
            self._moments = np.zeros((self._num_groups + 1, num_positions, NUM_MOMENTS))
            self._parts = np.zeros((num_parts, NUM_MOMENTS))
            self._part_positions = np.zeros((num_parts, num_positions, NUM_MOMENTS))
            self._names = self._names or [f"part {number}" for number in range(num_parts)]
            if self._has_parts and len(self._names) != num_parts:
                raise RecipeError(
                    f"TargetLosses names {len(self._names)} parts ({', '.join(self._names)}), but has {num_parts} at a "
                    "position; name each",
                    code="bad-loss",
                )
        losses, weights = self._to_one_length(losses, weights)
        firsts = np.flatnonzero(np.r_[True, clusters[1:] != clusters[:-1]])
        sums, counts = np.add.reduceat(losses, firsts), np.add.reduceat(weights, firsts)
        num_rows = np.diff(np.r_[firsts, len(clusters)])
        for i, first in enumerate(firsts):
            cluster = int(clusters[first])
            if self._open is not None and self._open[0] == cluster:
                _, group, before, losses, weights = self._open
                self._open = (cluster, group, before + int(num_rows[i]), losses + sums[i], weights + counts[i])
            else:
                self._close()
                self._open = (cluster, int(groups[first]), int(num_rows[i]), sums[i], counts[i])

    def _to_one_length(self, losses: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Batches may differ in the length of their longest row: what is shorter gets positions that count nothing."""
        has, new = len(self._moments[0]), losses.shape[1]
        if new > has:
            more = ((0, 0), (0, new - has), (0, 0))
            self._moments, self._part_positions = np.pad(self._moments, more), np.pad(self._part_positions, more)
            if self._open is not None:
                cluster, group, num_rows, *terms = self._open
                before, count = (np.pad(term, more[1:]) for term in terms)
                self._open = (cluster, group, num_rows, before, count)
        more = ((0, 0), (0, max(0, has - new)), (0, 0))
        return np.pad(losses, more), np.pad(weights, more)

    def _close(self) -> None:
        if self._open is None:
            return
        _, group, num_rows, losses, weights = self._open
        if self._has_parts:
            self._parts += moments_of(losses.sum(0), weights.sum(0))
            self._part_positions += moments_of(losses.T, weights.T)
        losses, weights = losses.sum(1), weights.sum(1)
        self._clusters.append((float(losses.sum()), float(weights.sum()), group, num_rows))
        self._moments[group] += moments_of(losses, weights)  # those of no group come last, which is -1
        self._open = None

    def figures(self, names: Sequence[str]) -> dict[str, Any]:
        self._close()
        assert self._clusters, "a stream without rows"
        table = np.array(self._clusters)
        sums, groups = table[:, [0, 1, 3]], table[:, 2].astype(int)
        result = _of_clusters(sums)
        result["positions"] = _curve(self._moments.sum(0))
        if self._has_parts:
            mean, error = ratio(self._parts)
            result["target_parts"] = {
                name: {
                    "loss": _plain(mean[number]),
                    "se": _plain(error[number]),
                    "targets": float(self._parts[number, 1]),
                    "positions": _curve(self._part_positions[number]),
                }
                for number, name in enumerate(self._names)
            }
        if not names:
            return result
        result["groups"] = {
            name: {**_of_clusters(sums[groups == i]), "positions": _curve(self._moments[i])}
            for i, name in enumerate(names)
        }
        known = [one for one in result["groups"].values() if one["loss"] is not None]
        has_errors = bool(known) and all(one["se"] is not None for one in known)
        result["mean_of_groups"] = {  # each group with the same weight
            "loss": sum(one["loss"] for one in known) / len(known) if known else None,
            "se": math.sqrt(sum(one["se"] ** 2 for one in known)) / len(known) if has_errors else None,
        }
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

"""A closer look at a fixed set than its average: the loss by group of rows and by position, with standard errors.

Losses are the terms of the one loss, in the precision of training, summed in float64. A standard error is that of a
ratio of sums over rows, so that targets of one row, which are not independent, count as one draw. Rows that overlap in
one document are taken as independent; where they are not, the error is too small.

The one surprising thing is the control: the same losses with the labels of the groups dealt out at random. What is
left of the spread between groups is what chance alone makes.
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
    groups = stream.group_of(rows)
    by_row = np.zeros((len(rows), 2))  # sum and count of each row
    by_place: np.ndarray | None = None  # (groups + none, positions, moments)
    size = setup.cfg.data.batch_size
    with eval_mode(model):
        for start in range(0, len(rows), size):
            places = np.arange(start, min(start + size, len(rows)))
            if report is not None:
                report(f"evaluating {name}", start, len(rows))
            losses, weights = _losses(setup, model, stream, places)
            by_row[places] = np.stack([losses.sum(1), weights.sum(1)], axis=1)
            if by_place is None:
                by_place = np.zeros((len(stream.groups) + 1, losses.shape[1], len(_Moments.NAMES)))
            np.add.at(by_place, groups[places], _Moments.of(losses, weights))
    if report is not None:
        report(f"evaluating {name}", len(rows), len(rows))
    assert by_place is not None, "a stream without rows"
    return _figures(by_row, groups, list(stream.groups), by_place)


def _losses(setup: Setup, model: nn.Module, stream: Stream, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, positions) float64, both. The draw is that of an eval at these places: see Evaluator."""
    draw = Draw(setup.cfg.seed, EVAL_STEP, places)
    batch, _ = to_device(stream.gather(places, draw), setup.world.device)
    seed_torch("eval", draw)
    with setup.precision.autocast():
        losses, weights = setup.recipe.target_losses(model, batch, draw)
    return losses.double().cpu().numpy(), weights.double().cpu().numpy()


class _Moments:
    """What a ratio of sums and its error need, added up over rows: one column each."""

    NAMES = ("loss", "weight", "loss_squared", "loss_weight", "weight_squared")

    @staticmethod
    def of(losses: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return np.stack([losses, weights, losses**2, losses * weights, weights**2], axis=-1)

    @staticmethod
    def ratio(moments: np.ndarray, num_rows: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        """Means and their standard errors; NaN where nothing was counted, or only one row."""
        loss, weight, squared, crossed, weight_squared = np.moveaxis(moments, -1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = loss / weight
            residuals = np.maximum(squared - 2 * mean * crossed + mean**2 * weight_squared, 0.0)
            n = np.asarray(num_rows, dtype=float)
            return mean, np.sqrt(residuals * n / (n - 1)) / weight


def _figures(by_row: np.ndarray, groups: np.ndarray, names: Sequence[str], by_place: np.ndarray) -> dict[str, Any]:
    result = _of_rows(by_row)
    rows_in = np.bincount(groups[groups >= 0], minlength=len(names)) if names else np.zeros(0, dtype=int)
    result["positions"] = _curve(by_place.sum(0), len(by_row))
    if not names:
        return result
    result["groups"] = {
        name: {**_of_rows(by_row[groups == i]), "positions": _curve(by_place[i], int(rows_in[i]))}
        for i, name in enumerate(names)
    }
    told = [one for one in result["groups"].values() if one["loss"] is not None]
    errors = [one["se"] for one in told]
    is_known = bool(told) and None not in errors
    result["mean_of_groups"] = {
        "loss": sum(one["loss"] for one in told) / len(told) if told else None,
        "se": math.sqrt(sum(error**2 for error in errors)) / len(told) if is_known else None,
    }
    shuffled = groups[np.random.default_rng(key_of("control", len(groups))).permutation(len(groups))]
    result["control"] = {
        "labels": _spread(by_row, groups, len(names)),
        "shuffled": _spread(by_row, shuffled, len(names)),
    }
    return result


def _of_rows(by_row: np.ndarray) -> dict[str, Any]:
    moments = _Moments.of(by_row[:, 0], by_row[:, 1]).sum(0)
    mean, error = _Moments.ratio(moments, len(by_row))
    return {
        "loss": _plain(mean),
        "se": _plain(error),
        "perplexity": _plain(np.exp(np.minimum(mean, 700.0))),
        "targets": float(by_row[:, 1].sum()),
        "rows": len(by_row),
    }


def _curve(moments: np.ndarray, num_rows: int) -> dict[str, list[Any]]:
    mean, error = _Moments.ratio(moments, num_rows)
    return {
        "loss": [_plain(value) for value in mean],
        "se": [_plain(value) for value in error],
        "targets": moments[:, 1].tolist(),
    }


def _spread(by_row: np.ndarray, groups: np.ndarray, num_groups: int) -> dict[str, Any]:
    """How far groups lie apart, in nats and in standard errors; chi2 is about df where labels mean nothing."""
    found = [_of_rows(by_row[groups == i]) for i in range(num_groups)]
    known = [one for one in found if one["loss"] is not None and one["se"]]
    if len(known) < 2:
        return {"spread": None, "largest_z": None, "chi2": None, "df": max(0, len(known) - 1)}
    weights = [one["se"] ** -2 for one in known]
    middle = sum(one["loss"] * weight for one, weight in zip(known, weights, strict=True)) / sum(weights)
    z = [(one["loss"] - middle) / one["se"] for one in known]
    losses = [one["loss"] for one in known]
    return {
        "spread": max(losses) - min(losses),
        "largest_z": max(map(abs, z)),
        "chi2": sum(value**2 for value in z),
        "df": len(known) - 1,
    }


def _plain(value: Any) -> float | None:
    """JSON knows no NaN."""
    return float(value) if math.isfinite(value) else None

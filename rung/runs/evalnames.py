"""Recognises an eval by the name of its metric, in loops and trackers that know no evals: `val/loss`, `eval_acc`.

A name says at most one set and one metric. What is not surely an eval stays a plain metric of its row: a wrong eval
would become the `best` of a run, a missed one is still a curve. Who found an eval so decides what to write.

The surprising thing: of `eval/a/b` the set is `a`, because that is how rung itself names its rows; of `val/a/b` it is
`val`.
"""

from __future__ import annotations

import re

SETS = {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout", "holdout"}
# With an underscore these are as often an adjective (valid_rows) or a shorthand (dev_mem) as a data set.
_DOUBTFUL = {"valid", "dev"}
_MEASURES = re.compile(
    r"(?:.*[^a-z0-9])?(?:loss|nll|ce|acc\w*|err|error|ppl|perplexity|bp[bcd]|f1|auc|auroc|iou|bleu|rouge\w*|wer|cer|"
    r"mse|rmse|mae|r2|psnr|ssim|fid|score)(?:[^a-z0-9].*)?"
)
# What the eval took or when it was, not what it found.
_CLOCKS = re.compile(r"s|ms|step|steps|global_step|epoch|epochs|time|.*_(?:s|ms|time)|.*runtime|.*per_second|.*per_sec")


def eval_name(metric: str) -> tuple[str, str] | None:
    """Set and name of an eval metric: val/loss, val_loss, loss/val, eval/full_val/loss; None for any other."""
    found = _by_path(metric) if "/" in metric else _by_words(metric)
    if found is None:
        return None
    of_set, name = found
    if not of_set or not name or _CLOCKS.fullmatch(name.lower()):
        return None
    return of_set, "loss" if name.lower() == "loss" else name


def _by_path(metric: str) -> tuple[str, str] | None:
    parts = metric.split("/")
    first, last = parts[0].lower(), parts[-1].lower()
    if first == "eval" and len(parts) > 2:
        return parts[1], "/".join(parts[2:])
    if first in SETS:
        return first, "/".join(parts[1:])
    if last in SETS:
        return last, "/".join(parts[:-1])
    return None


def _by_words(metric: str) -> tuple[str, str] | None:
    words = re.split(r"[_. -]", metric)
    first, last = words[0].lower(), words[-1].lower()
    if len(words) < 2:
        return None
    rest, stem = metric[len(first) + 1 :], metric[: -len(last) - 1]
    if first in SETS and (first not in _DOUBTFUL or _MEASURES.fullmatch(rest.lower())):
        return first, rest
    if last in SETS and _MEASURES.fullmatch(stem.lower()):
        return last, stem
    return None

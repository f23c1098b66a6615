"""Maps the metric names of other loops and trackers to rung's: evals by their name, and loss, norm and lr.

A name has at most one set and one metric: `val/loss`, `eval_acc`, `loss/test`. What is not surely an eval stays a plain
metric of its row: a wrong eval would become the `best` of a run, a missed one is still a curve. In `eval/a/b` the set
is `a`, as in rung's own rows; in `val/a/b` it is `val`, in `val_a/b` it is `val_a`. `eval_runtime` is a plain metric.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

SETS = {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout", "holdout"}
_SET = re.compile(rf"({'|'.join(sorted(SETS, key=len, reverse=True))})\d*", re.I)  # val, val2
# With an underscore these are as often an adjective (valid_rows) or a shorthand (dev_mem) as a data set.
_DOUBTFUL = {"valid", "dev"}
_MEASURES = re.compile(
    r"(?:.*[^a-z0-9])?(?:loss|nll|ce|acc\w*|err|error|ppl|perplexity|bp[bcd]|f1|auc|auroc|iou|bleu|rouge\w*|wer|cer|"
    r"mse|rmse|mae|r2|psnr|ssim|fid|score)(?:[^a-z0-9].*)?",
    re.I,
)
# What the eval took or when it was, not what it found.
_CLOCKS = re.compile(
    r"s|ms|step|steps|global_step|epoch|epochs|time|.*_(?:s|ms|time)|.*runtime|.*per_second|.*per_sec", re.I
)
_LOADER = re.compile(r"(.+)/dataloader_idx_(\d+)", re.S)  # what Lightning adds where there are several eval sets
_CALLED = {
    "loss": (
        "train/loss", "train_loss", "loss/train", "training_loss", "training/loss", "train/loss_step",
        "train_loss_step",
    ),
    "norm": ("grad_norm", "train/grad_norm", "gradient_norm", "train/norm", "train/grad_norm_total"),
    "lr": (
        "learning_rate", "train/learning_rate", "train/lr", "train_lr", "lr-adam", "lr-adamw", "lr-sgd",
    ),
}  # fmt: skip
_OURS = {name: ours for ours, names in _CALLED.items() for name in names}


class Eval(NamedTuple):
    set: str
    name: str


@lru_cache(maxsize=10_000)  # a loop has a few names; one that makes them up must not fill the memory
def eval_of(metric: str) -> Eval | None:
    """Set and name of an eval metric: val/loss, val_loss, loss/val, eval/full_val/loss; None for any other."""
    found = _named(metric)
    return None if found is None or _CLOCKS.fullmatch(found.name) else found


def is_eval_clock(metric: str) -> bool:
    """Whether it says when an eval was, or how long it took."""
    found = _named(metric)
    return found is not None and _CLOCKS.fullmatch(found.name) is not None


def usual_name(metric: str) -> str | None:
    """What rung calls a metric of training; only where there is no doubt."""
    return _OURS.get(metric.lower())


def _named(metric: str) -> Eval | None:
    if loader := _LOADER.fullmatch(metric):
        found = _named(loader[1])
        return None if found is None else Eval(f"{found.set}_{loader[2]}", found.name)
    of_set, name = _split(metric)
    if not of_set or not name:
        return None
    return Eval(of_set.lower() if _SET.fullmatch(of_set) else of_set, "loss" if name.lower() == "loss" else name)


def _split(metric: str) -> tuple[str, str]:
    """Set and name; "" for both where it is no eval."""
    if "/" not in metric:
        word, rest = _first_word(metric)
        if word and (word.lower() not in _DOUBTFUL or _MEASURES.fullmatch(rest)):
            return word, rest
        last = re.split(r"[_. -]", metric)[-1]
        stem = metric[: -len(last) - 1]
        return (last, stem) if _SET.fullmatch(last) and _MEASURES.fullmatch(stem) else ("", "")
    first, _, rest = metric.partition("/")
    stem, _, last = metric.rpartition("/")
    if first.lower() == "eval" and "/" in rest:
        of_set, _, name = rest.partition("/")
        return of_set, name
    if _SET.fullmatch(first):
        return first, rest
    if _SET.fullmatch(last):
        return last, stem
    word, part = _first_word(first)
    if word and _MEASURES.fullmatch(part):  # val_loss/head
        return word, f"{part}/{rest}"
    if word and (word.lower() not in _DOUBTFUL or _MEASURES.fullmatch(rest)):  # val_wiki/loss
        return first, rest
    return "", ""


def _first_word(text: str) -> tuple[str, str]:
    """Set and rest of val_loss; nothing where the first word is none."""
    word = re.split(r"[_. -]", text)[0]
    return (word, text[len(word) + 1 :]) if _SET.fullmatch(word) and len(text) > len(word) else ("", "")

"""What would let a rule look: for each thing that rules need, the key that a recipe sets, the line that a script adds.

A key is one of the run that has not recorded it; where nothing could (a recipe without a discriminator), the sentence
says what the rule is about, so that a reader knows that nothing is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rung.doctor.history import History


class Way(NamedTuple):
    recipe: str
    script: str


_WATCH, _GUARD = "run.watch(model, optimizer)", "run.guard(model, optimizer, loss=loss) in place of optimizer.step()"
_STATS = Way("signals.activation_stats_every=100", _GUARD)
_GAN = "of adversarial training only: "
_WAYS = {
    "loss": Way("its objective returns no loss", 'run.log({"loss": loss}) at each step'),
    "*/loss": Way("its objective returns no loss", 'run.log({"loss": loss}) at each step'),
    "norm": Way("optimizer.grad_clip=1", 'run.log({"grad_norm": clip_grad_norm_(..)}), or ' + _WATCH),
    "lr": Way("every recipe records it", 'run.log({"lr": lr})'),
    "tensors": Way("signals.layers_every=20", _WATCH),
    "weights_broken": Way("signals.layers_every=20", _GUARD),
    "attention": _STATS,
    "units": _STATS,
    "modules": _STATS,
    "entropy": _STATS,
    "logits/outside": _STATS,
    "logits/lse": _STATS,
    "logits/entropy": _STATS,
    "logits/loss": _STATS,
    "logits/target_share": _STATS,
    "logits/target_loss": _STATS,
    "eval/*/loss": Way("eval_interval=100, with an eval set", 'run.log({"val/loss": loss}) at several steps'),
    "eval/*@*": Way("of models that roll out: measures such as l1@8", 'run.log({"val/l1@1": .., "val/l1@8": ..})'),
    "*/accuracy": Way(_GAN + "a part `accuracy`", _GAN + 'run.log({"discriminator/accuracy": share})'),
    "probe/k": Way("signals.probes=true and three evals", ""),
    "probe/without_*": Way(
        "signals.probes=true, and Recipe.inputs names them", 'run.without("control", losses, losses_without)'
    ),
    "targets": Way("every recipe counts them", "run.targets(n) before the row of the step"),
    "targets_min": Way("every recipe counts them", "run.targets(n) before the row of the step"),
    "rows_per_step": Way("every recipe knows it", "run.rows(ids) at each step, the numbers of its rows"),
    "epoch_rows": Way("of streams that have an end", 'run.data("train", rows)'),
    "batch_hash": Way("every recipe records it", "run.rows(ids) at each step, the numbers of its rows"),
    "fresh": Way("every recipe records it", "run.rows(ids) at each step, the numbers of its rows"),
    "follows": Way("every recipe records it", "run.rows(ids) at each step, the numbers of its rows"),
    "scale": Way("of float16 only: system.dtype=float16", 'of float16 only: run.log({"scale": scaler.get_scale()})'),
    "skipped": Way("every recipe records it", _GUARD + ", or " + _WATCH),
    "wait_s": Way("of a device: every recipe records it", 'run.log({"wait_s": seconds spent on the next batch})'),
    "copy_s": Way("of a device: every recipe records it", 'run.log({"copy_s": seconds spent on copies})'),
    "step_s": Way("every recipe records it", 'run.log({"loss": loss}) at each step'),
    "memory_mb": Way("every recipe records it", _GUARD),
    "reserved_mb": Way("of a GPU: every recipe records it", _GUARD),
    "rss_mb": Way("every recipe records it", _GUARD),
    "parent": Way("rung train --parent RUN", 'rung.init(.., parent="RUN")'),
    "norm_first": Way("optimizer.gradient_accumulation_steps=2 or more", 'rung.init(.., parent="RUN")'),
    "recipe": Way("", "run.config.check_read(), where the script reads its config from run.config alone"),
    "unread_keys": Way("", "run.config.check_read(), where the script reads its config from run.config alone"),
    "code": Way("start it in a git checkout", "rung.init(.., code=True)"),
    "ranks_differ": Way("of several processes only", "of several processes only"),
    "num_ranks": Way("of several processes only", _WATCH),
    "left_out": Way("signals.layers_every=20", _WATCH),
    "trained_parameters": Way("signals.layers_every=20", _WATCH),
    "optimizer.eps": Way("optimizer.eps=1e-8", _WATCH),
    "optimizer.grad_clip": Way("optimizer.grad_clip=1", 'config={"optimizer": {"grad_clip": 1.0}}'),
    "lr.learning_rate": Way("lr.learning_rate=3e-4", 'run.log({"lr": lr})'),
    "observed": Way("", "train with an optimizer of torch in the process that logs"),
    "overlap": Way("", 'run.data("train", rows) and run.data("val", val_rows), with arrays or tensors'),
    "baselines": Way("", 'config={"vocab_size": n}, or run.data("val", path, unigram=nats)'),
}


def rank(line: str) -> int:
    """A guard measures what a watch does, and more."""
    return [_GUARD, _WATCH, line].index(line)


def way(need: str, history: History) -> str:
    """The easiest of the things that would provide it."""
    names = need.partition(":")[0].split("|")
    known = [found.script if history.is_script else found.recipe for name in names if (found := _WAYS.get(name))]
    return next(filter(None, known), "")

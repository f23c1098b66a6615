"""How large things are before the first step: the loss, activations, attention logits, what a block adds to its input.

One look of the engine's own (the same that signals take during training) gives all the numbers. Few of them have a
limit: how large a healthy activation is depends on the model, so most are stated for the reader and only what no
initialisation means to do is a warning.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import nn

from rung.doctor.preflight.forward import forward, in_eval, mean_of
from rung.doctor.preflight.result import CheckContext, NotApplicable, Result, check
from rung.engine.activations import ActivationStats, ActivationSummary
from rung.engine.config import SCRATCH
from rung.engine.guarded import not_finite

LOSS_SLACK = 0.3  # of ln C; a head of deviation 1 starts at several times ln C
LEAST_SLACK = 0.5  # nats: layers as torch makes them start up to .43 above ln C, of 2, 10 or 100 classes alike
LOSS_DEVIATION = 0.6  # nats, of the loss of one target among others of the same model: .2 to .8 in such layers
LARGEST_LOGIT = 50.0  # of trained weights: healthy runs have 1 to 16 at their end, lr x 100 thousands
# Of new ones: initialisations that are meant give 0.1 to 6, and normed queries and keys the root of the head's width.
LARGEST_AT_START = 12.0
LARGEST_RATIO = 10.0  # of what a block adds to what it got: 0.32 to 3.2 in a GPT of 12 layers at its start
GROWTH = 10.0  # times the depth: equal additions in one direction explain a growth by the depth, random ones its root


def look(context: CheckContext) -> ActivationSummary:
    """One look at the model, shared by these checks."""
    if "look" not in context.shared:
        setup = context.setup
        stats = ActivationStats(setup.state.model, setup.state.objectives[0], setup.precision)
        context.shared["look"] = stats.take(in_eval(context.micro), setup.state.progress.step), stats.reason
    summary, failure = context.shared["look"]
    if failure:
        raise NotApplicable(failure)
    return summary


def table(context: CheckContext, kind: str, column: str) -> dict[str, float]:
    """{module: number} in order of calls, without those for which there is none."""
    if kind not in (tables := look(context).tables):
        return {}
    names, columns = tables[kind]
    return {name: value for name, value in zip(names, columns[column].tolist()) if not math.isnan(value)}


@check("finite start", "N1")
def finite(context: CheckContext) -> Result:
    """Loss and gradients of the first rows; where they are not finite, the first module that is not."""
    objective = context.setup.state.objectives[0]
    loss = forward(context, context.micro)
    gradients = torch.autograd.grad(loss.sum, objective.parameters, allow_unused=True)
    bad = [p for p, g in zip(objective.parameters, gradients) if g is not None and not_finite([g])]
    is_finite = bool(torch.isfinite(loss.sum))
    if is_finite and not bad:
        seen = f"loss {mean_of(loss.sum, loss.count):.4g} and {sum(g is not None for g in gradients)} gradients"
        return Result("pass", seen)
    context.shared["broken"] = "loss or gradients are not finite"
    if is_finite:
        name = next((name for name, p in context.setup.state.model.named_parameters() if p is bad[0]), "?")
        seen = f"the loss is finite, the gradient of {name} is not ({len(bad)} are not)"
        remedy = "look for a root or a division at 0 whose result is masked: the gradient is not"
    else:
        names, columns = look(context).tables.get("modules", ([], {}))
        peaks = columns["peak"].tolist() if names else []
        first = next((name for name, peak in zip(names, peaks) if not math.isfinite(peak)), "")
        seen = f"the loss is {float(loss.sum.detach()):g}" + (f"; first in {first}" if first else "")
        remedy = "check what this module computes from its input: log 0, 0/0, an overflow, a fully masked row"
    return Result("fail", seen, remedy, rule="N2" if is_finite else "N1")


@check("initial loss", "A6")
def initial_loss(context: CheckContext) -> Result:
    """A model that knows nothing has a loss of ln C. Above that it is certain of something wrong.

    Only above: a head whose biases were set to the class frequencies, or pretrained weights, start below, and no bad
    initialisation does. A few rows with one target each are above by chance, so three standard errors are allowed too.
    """
    setup, scalars = context.setup, look(context).scalars
    is_new = setup.cfg.init_from in SCRATCH and setup.state.progress.step == 0
    if "logits/loss" in scalars:
        loss, chance = scalars["logits/loss"].item(), math.log(scalars["logits/vocab"].item())
        seen = f"{loss:.3f} against ln {scalars['logits/vocab'].item():.0f} = {chance:.3f} of a guess"
        error = LOSS_DEVIATION / math.sqrt(max(1.0, scalars["logits/targets"].item()))
        is_off = is_new and loss - chance > max(LOSS_SLACK * chance, LEAST_SLACK) + 3 * error
        seen += "" if is_new else "; the weights are trained"
        return Result("warn" if is_off else "pass", seen, "initialise the head smaller: deviation 0.02, or zeros")
    loss_now = forward(context, context.micro)
    trivial = ", ".join(f"{name} {value:.4g}" for s in setup.evaluator.streams.values()
                        for name, value in s.baselines.items())  # fmt: skip
    seen = f"{mean_of(loss_now.sum, loss_now.count):.4g}" + (f"; trivial models have {trivial}" if trivial else "")
    return Result("pass", f"{seen}; no cross entropy to compare with a guess")


@check("attention logits", "A6")
def attention(context: CheckContext) -> Result:
    """The largest attention logit: above some 12 the softmax is a hard choice before anything was learned."""
    logits = table(context, "attention", "logit")
    if not logits:
        raise NotApplicable("the model calls no attention of torch")
    where = max(logits, key=lambda name: logits[name])
    seen = f"largest logit {logits[where]:.3g} ({where}), of {len(logits)} attentions"
    remedy = "use smaller query and key weights, a scale of 1/sqrt(head width), or qk-norm"
    setup = context.setup
    is_new = setup.cfg.init_from in SCRATCH and setup.state.progress.step == 0
    limit = LARGEST_AT_START if is_new and not is_frozen(setup.state.model) else LARGEST_LOGIT
    if logits[where] > limit:
        return Result("warn", f"{seen}; above {limit:g} the softmax has chosen before it has learned", remedy)
    return Result("pass", seen)


@check("residual scale", "A6")
def residual(context: CheckContext) -> Result:
    """What each block adds to its input, and how the stream grows with depth.

    The first block is exempt from the limit: embeddings of deviation 0.02 are smaller than what a pre-norm block adds,
    and that trains. From the second on the stream has the size of what blocks add.
    """
    stacks = blocks(context)
    if not stacks:
        raise NotApplicable("the model has no stack of blocks whose inputs and outputs have one shape")
    ratios, entered = table(context, "modules", "ratio"), table(context, "modules", "entered")
    rms = table(context, "modules", "rms")
    worst, lines = "", []
    for stack, names in stacks.items():
        first, last = names[0], names[-1]
        adds = [ratios[name] for name in names]
        lines.append(f"{stack}: blocks add {min(adds):.2g} to {max(adds):.2g} of their input")
        if entered[first] > 0 and rms[last] > 0:
            lines[-1] += f", log growth {math.log(rms[last] / entered[first]) / len(names):.2f} a block"
        if (loud := max(names[1:], key=lambda n: ratios[n], default=None)) and ratios[loud] > LARGEST_RATIO:
            worst = f"{loud} adds {ratios[loud]:.3g} times its input"
        elif rms[last] > GROWTH * len(names) * rms[first] > 0:
            times = rms[last] / rms[first]
            worst = f"the output of {last} is {times:.3g} times that of {first}, over {len(names)} blocks"
    if worst:
        remedy = "scale output projections by 1/sqrt(2 x blocks), or normalise the input of each block"
        return Result("warn", worst, remedy, detail="\n".join(lines))
    return Result("pass", "; ".join(lines[:3]), detail="\n".join(lines[3:]))


def blocks(context: CheckContext) -> dict[str, list[str]]:
    """Lists of at least two modules with an input and an output of one shape, each fed by the one before it.

    Blocks that are frozen, but for an adapter perhaps, are as somebody trained them: nothing is to be scaled there.
    """
    model = context.setup.state.model
    entered, rms = table(context, "modules", "entered"), table(context, "modules", "rms")
    stacks: dict[str, list[str]] = {}
    for name, ratio in table(context, "modules", "ratio").items():
        if "#" not in name and math.isfinite(ratio) and not is_frozen(model.get_submodule(name)):
            stacks.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        stack: names
        for stack, names in stacks.items()
        if len(names) > 1 and all(math.isclose(rms[a], entered[b], rel_tol=1e-3) for a, b in pairwise(names))
    }


def is_frozen(module: nn.Module) -> bool:
    sizes = [(p.numel(), p.requires_grad) for p in module.parameters()]
    return sum(size for size, is_trained in sizes if is_trained) < sum(size for size, _ in sizes) / 2

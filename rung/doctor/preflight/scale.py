"""How large things are before the first step: the loss, activations, attention logits, what a block adds to its input.

One look of the engine's own (the same that signals take during training) gives all the numbers. Few of them have a
limit: how large a healthy activation is depends on the model, so most are stated for the reader and only what no
initialisation means to do is a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from rung.doctor.preflight.forward import NotAsked, forward, in_eval, mean_of
from rung.doctor.preflight.result import Bench, Check, Result
from rung.engine.config import SCRATCH
from rung.engine.guard import not_finite
from rung.engine.look import Look, Looked

LOSS_SLACK = 0.3  # of ln C; a head of deviation 1 starts at several times ln C
LEAST_SLACK = 0.5  # nats: layers as torch makes them start up to .43 above ln C, of 2, 10 or 100 classes alike
LOSS_DEVIATION = 0.6  # nats, of the loss of one target among others of the same model: .2 to .8 in such layers
LARGEST_LOGIT = 50.0  # healthy runs have 1 to 16 at their end, lr x 100 thousands
LARGEST_RATIO = 10.0  # of what a block adds to what it got: 0.32 to 3.2 in a GPT of 12 layers at its start
GROWTH = 10.0  # times the depth: equal additions in one direction explain a growth by the depth, random ones its root


def look(bench: Bench) -> Looked:
    """One look at the model, shared by these checks."""
    if "look" not in bench.shared:
        setup = bench.setup
        looker = Look(setup.state.model, setup.state.objectives[0], setup.precision)
        bench.shared["look"] = looker.take(in_eval(bench.micro), setup.state.progress.step)
        bench.shared["look_failed"] = looker.reason
    if bench.shared["look_failed"]:
        raise NotAsked(bench.shared["look_failed"])
    found: Looked = bench.shared["look"]
    return found


def table(bench: Bench, kind: str, column: str) -> dict[str, float]:
    """{module: number} in order of calls, without those for which there is none."""
    if kind not in (tables := look(bench).tables):
        return {}
    names, columns = tables[kind]
    return {name: value for name, value in zip(names, columns[column].tolist()) if not math.isnan(value)}


def finite(bench: Bench) -> Iterator[Result]:
    """Loss and gradients of the first rows; where they are not finite, the first module that is not."""
    setup = bench.setup
    objective = setup.state.objectives[0]
    loss = forward(bench, bench.micro)
    gradients = torch.autograd.grad(loss.sum, objective.parameters, allow_unused=True)
    bad = [p for p, g in zip(objective.parameters, gradients) if g is not None and not_finite([g])]
    names = {id(p): name for name, p in setup.state.model.named_parameters()}
    is_finite = bool(torch.isfinite(loss.sum))
    if is_finite and not bad:
        seen = f"loss {mean_of(loss.sum, loss.count):.4g} and {sum(g is not None for g in gradients)} gradients"
        yield Result("finite start", "pass", seen, rule="N1")
        return
    bench.shared["broken"] = "loss or gradients are not finite"
    if is_finite:
        seen = f"the loss is finite, the gradient of {names.get(id(bad[0]), '?')} is not ({len(bad)} are not)"
        remedy = "look for a root or a division at 0 whose result is masked: the gradient is not"
    else:
        first = _first_not_finite(bench)
        seen = f"the loss is {float(loss.sum.detach()):g}" + (f"; first in {first}" if first else "")
        remedy = "look at what this module computes from its input: log 0, 0/0, an overflow, a fully masked row"
    yield Result("finite start", "fail", seen, remedy, "N2" if is_finite else "N1")


def _first_not_finite(bench: Bench) -> str:
    names, columns = look(bench).tables.get("modules", ([], {}))
    peaks = columns["peak"].tolist() if names else []
    return next((name for name, peak in zip(names, peaks) if not math.isfinite(peak)), "")


def initial_loss(bench: Bench) -> Iterator[Result]:
    """A model that knows nothing has a loss of ln C. Above that it is sure of something false.

    Only above: a head whose biases were set to the frequencies of the data, or weights that a recipe brings along,
    start below, and nothing that is wrong with an initialisation does. A few rows with one target each are above by
    chance, so three errors of a mean over so many targets are allowed as well.
    """
    setup, scalars = bench.setup, look(bench).scalars
    is_new = setup.cfg.init_from in SCRATCH and setup.state.progress.step == 0
    if "look/loss" in scalars:
        loss, chance = scalars["look/loss"].item(), math.log(scalars["look/vocab"].item())
        seen = f"{loss:.3f} against ln {scalars['look/vocab'].item():.0f} = {chance:.3f} of a guess"
        error = LOSS_DEVIATION / math.sqrt(max(1.0, scalars["look/targets"].item()))
        if is_new and loss - chance > max(LOSS_SLACK * chance, LEAST_SLACK) + 3 * error:
            yield Result("initial loss", "warn", seen, "start the head smaller: deviation 0.02, or zeros", "A6")
            return
        yield Result("initial loss", "pass", seen if is_new else f"{seen}; the weights are trained", rule="A6")
        return
    loss_now = forward(bench, bench.micro)
    trivial = ", ".join(f"{name} {value:.4g}" for s in setup.evaluator.streams.values()
                        for name, value in s.baselines.items())  # fmt: skip
    seen = f"{mean_of(loss_now.sum, loss_now.count):.4g}" + (f"; trivial models have {trivial}" if trivial else "")
    yield Result("initial loss", "pass", f"{seen}; no cross entropy to compare with a guess", rule="A6")


def attention(bench: Bench) -> Iterator[Result]:
    """The largest attention logit: above 50 a softmax is a hard choice before anything was learned."""
    logits = table(bench, "attention", "logit")
    if not logits:
        raise NotAsked("no attention of torch was seen")
    where = max(logits, key=lambda name: logits[name])
    seen = f"largest logit {logits[where]:.3g} ({where}), of {len(logits)} attentions"
    if logits[where] > LARGEST_LOGIT:
        yield Result("attention logits", "warn", seen,
                     "smaller query and key weights, a scale of 1/sqrt(head width), or qk-norm", "A6")  # fmt: skip
    else:
        yield Result("attention logits", "pass", seen, rule="A6")


def residual(bench: Bench) -> Iterator[Result]:
    """What each block adds to its input, and how the stream grows with depth.

    The first block is exempt from the limit: embeddings of deviation 0.02 are smaller than what a pre-norm block adds,
    and that trains. From the second on the stream has the size of what blocks add.
    """
    stacks = blocks(bench)
    if not stacks:
        raise NotAsked("no stack of blocks whose input and output have one shape was seen")
    ratios, entered = table(bench, "modules", "ratio"), table(bench, "modules", "entered")
    rms = table(bench, "modules", "rms")
    worst, said = "", []
    for stack, names in stacks.items():
        first, last = names[0], names[-1]
        adds = [ratios[name] for name in names]
        said.append(f"{stack}: blocks add {min(adds):.2g} to {max(adds):.2g} of their input")
        if entered[first] > 0 and rms[last] > 0:
            said[-1] += f", log growth {math.log(rms[last] / entered[first]) / len(names):.2f} a block"
        if (loud := max(names[1:], key=lambda n: ratios[n], default=None)) and ratios[loud] > LARGEST_RATIO:
            worst = f"{loud} adds {ratios[loud]:.3g} times its input"
        elif rms[last] > GROWTH * len(names) * rms[first] > 0:
            worst = (
                f"the output of {last} is {rms[last] / rms[first]:.3g} times that of {first}, over {len(names)} blocks"
            )
    if worst:
        yield Result("residual scale", "warn", worst,
                     "scale output projections by 1/sqrt(2 x blocks), or normalise the input of each block", "A6",
                     detail="\n".join(said))  # fmt: skip
    else:
        yield Result("residual scale", "pass", "; ".join(said[:3]), rule="A6", detail="\n".join(said[3:]))


def blocks(bench: Bench) -> dict[str, list[str]]:
    """Lists of at least two modules with an input and an output of one shape, each fed by the one before it."""
    entered, rms = table(bench, "modules", "entered"), table(bench, "modules", "rms")
    stacks: dict[str, list[str]] = {}
    for name, ratio in table(bench, "modules", "ratio").items():
        if "#" not in name and math.isfinite(ratio):
            stacks.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        stack: names
        for stack, names in stacks.items()
        if len(names) > 1 and all(math.isclose(rms[a], entered[b], rel_tol=1e-3) for a, b in pairwise(names))
    }


CHECKS = [
    Check("finite start", finite),
    Check("initial loss", initial_loss),
    Check("attention logits", attention),
    Check("residual scale", residual),
]

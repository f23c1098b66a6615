"""Whether an eval and a sample leave everything as it was, to the bit.

The engine puts back what they change, at every eval and sample; here it is known before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rung.doctor.preflight.result import CheckContext, Result, check
from rung.engine.evaluate import Evaluator
from rung.engine.parallel import World
from rung.engine.purity import Changes, named, pure
from rung.random import Draw

ROWS = 4


@check("evals and samples", "E4")
def evals_and_samples(context: CheckContext) -> Iterator[Result]:
    """The quick form makes no sample, which may take long."""
    setup, told = context.setup, Changes()
    state, objective = setup.state, setup.state.objectives[0]
    looked = []
    if streams := dict(list(setup.evaluator.streams.items())[: 1 if context.is_quick else None]):
        world = World(0, 1, setup.world.device)
        evaluator = Evaluator(setup.recipe, streams, objective, setup.precision, world, ROWS, 1, setup.cfg.seed)
        with pure(state) as changes:
            evaluator.run(state.model)
        looked.append("an eval")
        yield from _impure("an eval", changes)
        told |= changes.told
    if not context.is_quick:
        try:
            with pure(state) as changes:
                samples = setup.samples(Draw(setup.cfg.seed, state.progress.step, np.arange(1)))
        except Exception as error:  # training goes on without samples
            seen = f"a sample fails: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            yield Result("warn", seen, "fix sample(), or there will be none", name="samples", rule="")
            samples = ()
        if samples:
            looked.append("a sample")
        yield from _impure("a sample", changes)
        told |= changes.told
    if not looked:
        yield Result("skip", "the recipe has no eval set" + ("" if context.is_quick else ", and makes no samples"))
    elif not told:
        yield Result("pass", f"{' and '.join(looked)} left weights, buffers, optimizers and modes as they were")


def _impure(what: str, changes: Changes) -> Iterator[Result]:
    if changes.told:
        remedy = "let it work on a copy of what it changes; training puts it back, at each eval and sample"
        if not changes.undone:
            remedy = "let it work on a copy of what it changes; it is too large for training to put it back"
        yield Result("warn", f"{what} changes {named(changes.told)}", remedy)

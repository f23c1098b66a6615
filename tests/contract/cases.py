"""Every recipe of the catalog, small enough for a test, and a toy unlike any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.cli.resolve import schema_of
from rung.config import Layer, parse_overrides
from rung.engine.build import Setup, build
from rung.recipe import Recipe
from tests.contract.toy import Toy

SMALL = [
    "system.device=cpu",
    "system.dtype=float32",
    "data.batch_size=8",
    "optimizer.max_iters=12",
    "lr.warmup_iters=2",
    "eval_interval=5",
    "checkpoint.every=4",
    "checkpoint.keep=0",
    "lr.learning_rate=1e-3",
]


@dataclass(frozen=True)
class Case:
    name: str
    recipe_class: type[Recipe]
    words: tuple[str, ...]
    overfit: tuple[str, ...] = ()
    overfit_below: float = 0.0  # the loss that eight memorised rows must reach
    calm: tuple[str, ...] = ()  # what switches dropout off, whose mask is drawn per micro

    def setup(self, *more: str, root: Path = Path("runs")) -> Setup:
        return build(self.config(*more), self.recipe_class, root)

    def config(self, *more: str) -> Any:
        merged = {word.partition("=")[0]: word for word in (*SMALL, *self.words, *more)}
        layer = Layer("command line", parse_overrides(merged.values()))
        return schema_of(self.name, self.recipe_class).resolve([layer])


def piano(data: Path) -> Case:
    from rung.recipes.piano.recipe import Piano

    words = (
        f"dataset.base_dataset_name={data} model.n_layer=2 model.n_head=2 model.n_embd=32 data.context_size=48 "
        "sampling.num_tokens=40 model.dropout=0.1"
    )
    return Case(
        "piano", Piano, tuple(words.split()), ("lr.learning_rate=1e-2", "model.dropout=0"), 0.5, ("model.dropout=0",)
    )


def toy(data: Path) -> Case:
    return Case(
        "toy", Toy, (), ("lr.learning_rate=3e-2", "model.adversarial=0", "model.width=32"), 0.35, ("model.dropout=0",)
    )


# One line per recipe of the catalog; test_catalog fails when one is missing.
CASES: dict[str, Callable[[Path], Case]] = {"piano": piano, "toy": toy}

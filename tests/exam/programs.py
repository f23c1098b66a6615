"""The programs of the exam: a base that trains well, changed into a shape with one fault, and its twin without it.

A change is (old, new) text of the base, and old must occur in it exactly once: a base that moved on makes the exam
fail, instead of asking about a fault that is no longer there.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path

BASES = Path(__file__).parent / "bases"
RECIPES = {"bytes_gru": "Bytes", "steering": "Steering", "melody": "Melody"}
KEYS = "optimizer.max_iters=250 lr.warmup_iters=10 eval_interval=50 lr.learning_rate=5e-3 data.batch_size=16"

Edits = list[tuple[str, str]]


@dataclass(frozen=True)
class Shape:
    """One member of a class of faults; `both` is what it shares with its twin, `fault` what only the sick one has."""

    name: str
    base: str
    fault: Edits
    both: Edits = field(default_factory=list)
    twin: bool = False
    keys: str = ""  # of the sick one
    twin_keys: str = ""
    says: str = ""  # in place of that of its class

    @property
    def seed(self) -> int:
        """The same for the sick one and its twin."""
        return zlib.crc32(self.name.encode()) % 9000 + 100

    @property
    def is_recipe(self) -> bool:
        return self.base in RECIPES

    def source(self, sick: bool) -> str:
        text = (BASES / f"{self.base}.py").read_text()
        for old, new in [*self.both, *(self.fault if sick else [])]:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {text.count(old)} times in {self.base}.py: {old!r}")
            text = text.replace(old, new)
        return text.replace("1337", str(self.seed))


@dataclass(frozen=True)
class Pair:
    """Two runs of one folder, told to rung diff; what the second differs in is to be named."""

    name: str
    files: dict[str, str]  # before the first run
    changes: dict[str, str]  # written before the second
    twin: bool = False
    env: dict[str, str] = field(default_factory=dict)  # of the second run
    first_env: dict[str, str] = field(default_factory=dict)
    git: bool = False
    says: str = ""
    command: tuple[str, ...] = ("train.py",)


@dataclass(frozen=True)
class Class:
    """Shapes of one fault, and the words of an honest diagnosis, written before any output was seen."""

    what: str
    says: str
    shapes: list[Shape | Pair]


def classes() -> dict[str, Class]:
    """Every class of the exam, by the name of its module."""
    from tests.exam import classes as package

    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = {name: importlib.import_module(f"tests.exam.classes.{name}").CLASS for name in names}
    for one in found.values():
        re.compile(one.says)
    return found

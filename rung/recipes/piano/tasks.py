"""What a model can be asked to do with a piece: each task splits notes into a prompt and an answer.

A split is a pure function of the notes, the values of the parameters and a seed. `join` puts prompt and answer together
again, for the eye and the ear. How both become tokens is in sequence.py; which task a row gets, in rows.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np


class Split(NamedTuple):
    """Both on the time of the piece, which begins at 0; neither is empty where the piece has two notes or more."""

    prompt: np.ndarray
    target: np.ndarray


class Parameter(NamedTuple):
    """A whole number that the model is told as a token."""

    name: str  # in the config and in help: percent, seconds, ...
    low: int  # what it can be, 0 .. MOST_PARAMETER of the tokenizer
    high: int
    usual: tuple[int, int]  # what is drawn from where the config does not say
    doc: str


@dataclass(frozen=True)
class Task:
    name: str
    kind: Literal["combine", "replace"]  # whether the answer adds notes to the prompt, or stands in its place
    doc: str
    parameters: tuple[Parameter, ...]
    split: Callable[[np.ndarray, tuple[int, ...], int], Split]  # notes, values of the parameters, seed
    origin: Callable[[np.ndarray, tuple[int, ...]], float]  # prompt, values -> where the clock of the answer begins, s

    def join(self, prompt: np.ndarray, target: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class Choice(NamedTuple):
    """A task as a config asks for it."""

    task: Task
    weight: float
    ranges: tuple[tuple[int, int], ...]  # of each parameter, both ends included

    def draw(self, uniform: np.ndarray) -> tuple[int, ...]:
        """Values of the parameters from numbers in [0, 1), one each."""
        raise NotImplementedError


TASKS: dict[str, Task] = {}


def parse(tasks: object) -> list[Choice]:
    """The choices of a config's `tasks`; raises ConfigError for what cannot be."""
    return []

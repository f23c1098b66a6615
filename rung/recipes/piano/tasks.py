"""Tasks of the piano model: each splits the notes of a piece into a prompt and an answer, which are one row of tokens.

    <CLS> [data set, composer] task, its parameters, prompt <GENAI> answer <EOGENAI>

A split is a pure function of the quantised notes, the values of the parameters and a seed. Values may not suit a piece
(nothing starts after 30 s in one of 20 s): `Task.fitting` changes them, and the model must be given the fitting ones.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from rung.errors import ConfigError
from rung.random import Draw
from rung.recipes.piano.notes import UNIT_S, moved, quantise, units
from rung.recipes.piano.tokenizer import CLS, COMPOSERS, DATASETS, EOGENAI, GENAI, MOST_PARAMETER, TASK_NAMES, TOKENIZER
from rung.text import one_line

NEAR = 20  # units: notes that start closer than 0.2 s are struck together, as far as lines go
HALF_SECOND = 50  # units: what infill counts its span in

Values = tuple[int, ...]


class Split(NamedTuple):
    """Both on the time of the piece, which begins at 0; neither is empty where the piece has two notes or more."""

    prompt: np.ndarray
    target: np.ndarray


class Parameter(NamedTuple):
    """A whole number that the model is given as a token."""

    name: str  # in the config: percent, length, ...
    low: int  # what it can be, 0 .. MOST_PARAMETER of the tokenizer
    high: int
    usual: tuple[int, int]  # the range that values are drawn from unless the config gives one
    caption: str = "{:g} percent"  # of the value times `scale`
    scale: float = 1.0


@dataclass(frozen=True)
class Task:
    """The answer of a task that combines adds notes to the prompt; that of one that replaces stands in its place."""

    name: str
    kind: Literal["combine", "replace"]
    parameters: tuple[Parameter, ...]
    # Notes, values, seed -> to combine: which notes are the answer; to replace: the prompt, the notes with changes.
    choose: Callable[[np.ndarray, Values, int], np.ndarray]
    # Prompt, values -> where the clock of the answer begins, in seconds.
    origin: Callable[[np.ndarray, Values], float] = lambda prompt, values: 0.0
    # Notes, values -> the values that suit these notes.
    fitting: Callable[[np.ndarray, Values], Values] = lambda notes, values: values

    def split(self, notes: np.ndarray, values: Values, seed: int) -> Split:
        chosen = self.choose(notes, values, seed)
        return Split(notes[~chosen], notes[chosen]) if self.kind == "combine" else Split(chosen, notes.copy())

    def join(self, prompt: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The whole that an answer makes with its prompt; where both strike a key at once, that is one note."""
        return quantise(np.concatenate([prompt, target]) if self.kind == "combine" else target)

    def describe(self, values: Sequence[int]) -> str:
        """For captions: high_notes, 30 percent."""
        parts = (p.caption.format(value * p.scale) for p, value in zip(self.parameters, values, strict=True))
        return ", ".join([self.name, *parts])

    def values_of(self, given: Sequence[int]) -> Values:
        """What a user gives as sampling.parameters, checked; nothing: the middle of each usual range."""
        if not given:
            return tuple(sum(p.usual) // 2 for p in self.parameters)
        if len(given) != len(self.parameters):
            raise ConfigError(
                f"sampling.parameters={list(given)}: {self.name} takes {_listed(self.parameters)}", code="bad-value"
            )
        return tuple(_range("sampling.parameters", self, p, v)[0] for p, v in zip(self.parameters, given))


class Choice(NamedTuple):
    """A task as a config asks for it."""

    task: Task
    weight: float
    ranges: tuple[tuple[int, int], ...]  # of each parameter, both ends included

    def draw(self, uniform: np.ndarray) -> Values:
        """Values of the parameters from numbers in [0, 1), one each."""
        drawn = zip(self.ranges, np.asarray(uniform, dtype=np.float64).ravel().tolist())
        return tuple(low + min(int(u * (high - low + 1)), high - low) for (low, high), u in drawn)


# What is the answer


def _share(num_notes: int, percent: int) -> int:
    """At least one note, and never all of them."""
    return max(0, min(num_notes - 1, max(1, (num_notes * percent + 50) // 100)))


def _least(measure: np.ndarray, percent: int) -> np.ndarray:
    """The share of notes with the least measure; of equal ones the earlier."""
    chosen = np.zeros(len(measure), dtype=bool)
    chosen[np.argsort(measure, kind="stable")[: _share(len(measure), percent)]] = True
    return chosen


def _lengths(notes: np.ndarray) -> np.ndarray:
    return units(notes["end"]) - units(notes["start"])


def line(notes: np.ndarray, sign: int) -> np.ndarray:
    """Which of some quantised notes are the top line (sign 1) or the bottom line (-1); never all of them.

    A note is hidden by a higher one that is struck with it (less than 0.2 s apart, and sounding together for more than
    half of the shorter of the two), or that was struck before it and is held for more than 0.2 s into it. The top line
    is every note that no other hides; the bottom line is the same upside down. Steps of a run, each ending about where
    the next begins, do not hide one another, and the notes of a rolled chord do. Where nothing is hidden, the lowest
    note is left out.

    It is the melody as far as the melody lies on top: in 120 songs of POP909 (tracks MELODY and PIANO) the top line
    holds 91 % of the melody's notes, and 58 % of the top line are notes of the melody.
    """
    start, end, height = units(notes["start"]), units(notes["end"]), sign * notes["pitch"].astype(np.int64)
    # Every pair that sounds together: each note with those that start after it and before its end.
    num_after = start.searchsorted(end) - np.arange(1, len(notes) + 1)
    early = np.repeat(np.arange(len(notes)), num_after)
    late = early + 1 + np.arange(len(early)) - np.repeat(np.cumsum(num_after) - num_after, num_after)
    together = np.minimum(end[early], end[late]) - start[late]
    apart, length = start[late] - start[early], end - start
    is_chord = (apart < NEAR) & (2 * together > np.minimum(length[early], length[late]))
    is_held = end[early] > start[late] + NEAR  # or both start at once, and are a chord
    is_line = np.ones(len(notes), dtype=bool)
    is_line[early[(height[late] > height[early]) & is_chord]] = False
    is_line[late[(height[early] > height[late]) & (is_chord | is_held)]] = False
    if is_line.all() and len(notes):
        is_line[np.argmin(height)] = False
    return is_line


def _reachable_span(notes: np.ndarray, values: Values) -> Values:
    """A span in which a note starts, besides the first of the piece: one too late is wrapped round, then moved on."""
    begin, length = values
    starts = units(notes["start"])[1:] // HALF_SECOND
    if len(starts) == 0:
        return values
    begin %= min(int(starts[-1]), MOST_PARAMETER) + 1
    following = int(starts[starts.searchsorted(begin)])
    if following < begin + length:
        return begin, length
    if following > MOST_PARAMETER:  # a long silence: back to what comes before it
        following = int(starts[max(int(starts.searchsorted(begin)) - 1, 0)])
    return min(following, MOST_PARAMETER), length


def _in_span(notes: np.ndarray, values: Values, seed: int) -> np.ndarray:
    begin, length = _reachable_span(notes, values)
    start = units(notes["start"])
    is_later = (np.arange(len(notes)) > 0) & (start >= begin * HALF_SECOND)
    chosen = is_later & (start < (begin + length) * HALF_SECOND)
    # A second note that comes after a minute of silence is past every span: then all that follows is the answer.
    return chosen if chosen.any() else is_later


def _noise(num_notes: int, num_values: int, most: int, seed: int) -> np.ndarray:
    """Whole numbers in -most .. most, all equally likely."""
    uniform = Draw(seed, 0, np.arange(num_notes)).uniform("noise", num_values)
    return (uniform * (2 * most + 1)).astype(np.int64) - most


def _disturb_velocity(notes: np.ndarray, values: Values, seed: int) -> np.ndarray:
    prompt = notes.copy()
    prompt["velocity"] = (notes["velocity"] + _noise(len(notes), 1, values[0], seed)[:, 0]).clip(1, 127)
    return prompt


def _disturb_timing(notes: np.ndarray, values: Values, seed: int) -> np.ndarray:
    moves = _noise(len(notes), 2, values[0], seed)
    prompt = notes.copy()
    prompt["start"] = np.maximum(units(notes["start"]) + moves[:, 0], 0) * UNIT_S
    prompt["end"] = (units(notes["end"]) + moves[:, 1]) * UNIT_S
    return quantise(prompt)  # which makes what ends too early one unit long


_SHARE = (Parameter("percent", 5, 100, (5, 100)),)  # of the notes that is the answer; one note always stays
_GIVEN = (Parameter("percent", 5, 95, (10, 90), "after {:g} percent"),)  # of the notes that is the prompt
_SPAN = (  # in half seconds; one past the end of the piece is wrapped round, one without notes moved
    Parameter("from", 0, MOST_PARAMETER, (0, MOST_PARAMETER), "from {:g} s", 0.5),
    Parameter("length", 1, MOST_PARAMETER, (2, 16), "{:g} s long", 0.5),
)
_LOUDNESS = (Parameter("amount", 1, 127, (10, 60), "off by up to {:g}"),)
_TIMING = (Parameter("amount", 1, 127, (2, 30), "off by up to {:g} s", UNIT_S),)
_ALL = (
    Task("continuation", "combine", _GIVEN,
         lambda notes, values, _: np.arange(len(notes)) >= max(_share(len(notes), values[0]), min(1, len(notes))),
         origin=lambda prompt, values: float(prompt["start"][-1]) if len(prompt) else 0.0),
    Task("top_line", "combine", (), lambda notes, *_: line(notes, 1)),
    Task("bottom_line", "combine", (), lambda notes, *_: line(notes, -1)),
    Task("high_notes", "combine", _SHARE, lambda notes, values, _: _least(-notes["pitch"].astype(int), values[0])),
    Task("low_notes", "combine", _SHARE, lambda notes, values, _: _least(notes["pitch"], values[0])),
    Task("short_notes", "combine", _SHARE, lambda notes, values, _: _least(_lengths(notes), values[0])),
    Task("long_notes", "combine", _SHARE, lambda notes, values, _: _least(-_lengths(notes), values[0])),
    Task("infill", "combine", _SPAN, _in_span,
         origin=lambda prompt, values: values[0] * HALF_SECOND * UNIT_S, fitting=_reachable_span),
    Task("velocity_denoising", "replace", _LOUDNESS, _disturb_velocity),
    Task("timing_denoising", "replace", _TIMING, _disturb_timing),
    Task("harmonise", "combine", (), lambda notes, *_: ~line(notes, 1)),
)  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in _ALL}
assert tuple(TASKS) == TASK_NAMES  # each has its token


# As tokens


class Example(NamedTuple):
    """A task with its answer; notes are quantised."""

    task: Task
    values: Sequence[int]
    prompt: np.ndarray
    target: np.ndarray
    prefix: Sequence[int] = ()


def sequences(examples: Sequence[Example]) -> list[np.ndarray]:
    """The whole row of each example, question and answer; all are encoded at once.

    The clock of the prompt begins at 0, that of the answer at `Task.origin`, which the prompt and the parameters
    decide, so that a reader of the answer can put it back in its place.
    """
    answers = [moved(one.target, -one.task.origin(one.prompt, tuple(one.values))) for one in examples]
    ids = TOKENIZER.encode_all([*(one.prompt for one in examples), *answers])
    return [
        np.concatenate([_head(one.task, one.values, one.prefix), prompt, _GENAI, answer, _EOGENAI])
        for one, prompt, answer in zip(examples, ids, ids[len(examples) :])
    ]


def question(task: Task, values: Sequence[int], prompt: np.ndarray, prefix: Sequence[int] = ()) -> np.ndarray:
    """What the model is given: all up to <GENAI>."""
    return np.concatenate([_head(task, values, prefix), TOKENIZER.encode(prompt), _GENAI])


_GENAI, _EOGENAI = np.array([GENAI], dtype=np.uint16), np.array([EOGENAI], dtype=np.uint16)


def _head(task: Task, values: Sequence[int], prefix: Sequence[int]) -> np.ndarray:
    names = [f"<TASK_{task.name.upper()}>", *(f"<PARAMETER_{value}>" for value in values)]
    return np.array([CLS, *prefix, *(TOKENIZER.ids[name] for name in names)], dtype=np.uint16)


_TASK_OF_ID = {TOKENIZER.ids[f"<TASK_{name.upper()}>"]: task for name, task in TASKS.items()}
_VALUE_OF_ID = {TOKENIZER.ids[f"<PARAMETER_{value}>"]: value for value in range(MOST_PARAMETER + 1)}


def read_question(ids: np.ndarray) -> tuple[Task | None, Values]:
    """The task that a row asks for, and the values of its parameters; None: it is a window of a performance."""
    task = next((_TASK_OF_ID[id] for id in ids.tolist() if id in _TASK_OF_ID), None)
    return task, tuple(_VALUE_OF_ID[id] for id in ids.tolist() if id in _VALUE_OF_ID)


def read_answer(ids: np.ndarray, origin_s: float) -> np.ndarray:
    """The notes of an answer in the time of the piece. What comes before <GENAI> or after <EOGENAI> is skipped."""
    begins = np.flatnonzero(ids == GENAI)
    ids = ids[begins[0] + 1 :] if len(begins) else ids
    ends = np.flatnonzero(ids == EOGENAI)
    return quantise(moved(TOKENIZER.decode(ids[: ends[0]] if len(ends) else ids), origin_s))


def prefix_of(dataset: str, composer: str) -> list[int]:
    """The two tokens that name where a row is from; what has no token of its own is `other`."""
    plain = "".join(letter for letter in dataset.lower() if letter.isalnum())
    known = next((name for name in DATASETS[:-1] if name in plain), DATASETS[-1])
    whom = next((name for name in COMPOSERS[:-1] if is_by(composer, name)), COMPOSERS[-1])
    return [TOKENIZER.ids[f"<DATASET_{known.upper()}>"], TOKENIZER.ids[f"<COMPOSER_{whom.upper()}>"]]


def is_by(composer: str, surname: str) -> bool:
    """Whether a composer as a data set writes the name ("Johann Sebastian Bach", "bach_js") has this surname."""
    return surname.lower() in re.split(r"[\W_]+", composer.lower())


# As a config asks for them


def parse(tasks: object) -> list[Choice]:
    """The choices of a config's `tasks`; raises ConfigError for what cannot be."""
    if tasks in ("all", "TODO"):  # TODO stands for what is not decided yet
        tasks = list(TASKS)
    entries = [tasks] if isinstance(tasks, (str, Mapping)) else tasks
    if not isinstance(entries, (list, tuple)):
        raise ConfigError(
            f"tasks is {one_line(tasks)}; write all, a name, or a list of names and mappings", code="bad-value"
        )
    if not entries:
        raise ConfigError("tasks is empty; name at least one task, or write all", code="bad-value")
    choices: list[Choice] = []
    for entry in entries:
        choice = _choice(entry)
        if any((choice.task, choice.ranges) == (other.task, other.ranges) for other in choices):
            raise ConfigError(
                f"tasks: {choice.task.name} is there twice with the same parameters; raise its weight", code="bad-value"
            )
        choices.append(choice)
    return choices


def _choice(entry: object) -> Choice:
    given = {"name": entry} if isinstance(entry, str) else entry
    name = given.get("name") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(name, str):
        raise ConfigError(
            f"tasks has {one_line(entry)}; write a name, or {{name: infill, weight: 2, length: [4, 16]}}",
            code="bad-value",
        )
    if name not in TASKS:
        hint = f"{_near(name, TASKS)} (there are: {', '.join(TASKS)})"
        if name in ("all", "TODO"):
            hint = f", and stands alone: write tasks={name}, or list names"
        elif "," in name:
            hint = f"; several are written as a list: [{one_line(name)}]"
        raise ConfigError(f"tasks: {one_line(name)} is not a task{hint}", code="no-task")
    task = TASKS[name]
    known = [p.name for p in task.parameters]
    for key in given:
        if key not in ("name", "weight", *known):
            hint = _near(str(key), [*known, "weight"])
            raise ConfigError(
                f"tasks: {name} has no {one_line(key)}{hint} (it has {_listed(task.parameters)})", code="no-key"
            )
    weight = given.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not (weight > 0 and math.isfinite(weight)):
        raise ConfigError(
            f"tasks: weight of {name} is {one_line(weight)}; it must be a number above 0", code="bad-range"
        )
    ranges = (_range("tasks", task, p, given[p.name]) if p.name in given else p.usual for p in task.parameters)
    return Choice(task, float(weight), tuple(ranges))


def _range(where: str, task: Task, parameter: Parameter, value: object) -> tuple[int, int]:
    what = f"{where}: {parameter.name} of {task.name} is {one_line(value)}"
    ends = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(ends) != 2 or not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
        raise ConfigError(f"{what}; it must be a whole number, or two as a range [low, high]", code="bad-value")
    low, high = ends
    if low > high:
        raise ConfigError(f"{what}; the lower end comes first: [{high}, {low}]", code="bad-range")
    if low < parameter.low or high > parameter.high:
        raise ConfigError(f"{what}; it can be {parameter.low} to {parameter.high}", code="bad-range")
    return low, high


def _listed(parameters: Sequence[Parameter]) -> str:
    return ", ".join(p.name for p in parameters) or "no parameters"


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""

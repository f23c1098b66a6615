"""What a model can be asked to do with a piece: each task splits notes into a prompt and an answer.

A split is a pure function of the notes, the values of the parameters and a seed. Notes must be quantised, as `quantise`
or a tokenizer gives them, and so are both parts. Tasks that combine share the notes out, so that `join` gives the piece
again; in those that replace, the prompt is the piece disturbed and the answer the piece itself. How both become tokens
is in sequence.py; which task a row gets, in rows.py.

The one surprising thing is that values may not suit a piece: nothing starts after 30 s in one that is 20 s long. Such
values are changed by `Task.fitting`, and it is the fitting ones that the model must be told.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from rung.errors import ConfigError
from rung.recipe import Draw
from rung.recipes.piano.notes import UNIT_S, quantise, units
from rung.recipes.piano.tokenizer import MOST_PARAMETER, TASK_NAMES
from rung.text import one_line

NEAR = 20  # units: notes that start closer than 0.2 s are struck together, as far as lines go
HALF_SECOND = 50  # units: what infill counts its span in

Values = tuple[int, ...]


class Split(NamedTuple):
    """Both on the time of the piece, which begins at 0; neither is empty where the piece has two notes or more."""

    prompt: np.ndarray
    target: np.ndarray


class Parameter(NamedTuple):
    """A whole number that the model is told as a token."""

    name: str  # in the config and in help: percent, length, ...
    low: int  # what it can be, 0 .. MOST_PARAMETER of the tokenizer
    high: int
    usual: tuple[int, int]  # what is drawn from where the config does not say
    doc: str
    words: str = "{:g} percent"  # in a caption, of the value times `scale`
    scale: float = 1.0


def _as_given(notes: np.ndarray, values: Values) -> Values:
    return values


def _from_0(prompt: np.ndarray, values: Values) -> float:
    return 0.0


@dataclass(frozen=True)
class Task:
    name: str
    kind: Literal["combine", "replace"]  # whether the answer adds notes to the prompt, or stands in its place
    doc: str
    parameters: tuple[Parameter, ...]
    split: Callable[[np.ndarray, Values, int], Split]  # quantised notes, values of the parameters, seed
    origin: Callable[[np.ndarray, Values], float] = _from_0  # prompt, values -> where the clock of the answer begins, s
    fitting: Callable[[np.ndarray, Values], Values] = _as_given  # notes, values -> the values that suit these notes

    def join(self, prompt: np.ndarray, target: np.ndarray) -> np.ndarray:
        """The whole that an answer makes with its prompt; where both strike a key at once, that is one note."""
        return quantise(np.concatenate([prompt, target]) if self.kind == "combine" else target)

    def describe(self, values: Sequence[int]) -> str:
        """For captions: high_notes, 30 percent."""
        said = (p.words.format(value * p.scale) for p, value in zip(self.parameters, values, strict=True))
        return ", ".join([self.name, *said])

    def values_of(self, given: Sequence[int]) -> Values:
        """What a user gives, checked; the middle of each usual range where nothing is given."""
        if not given:
            return tuple(sum(p.usual) // 2 for p in self.parameters)
        if len(given) != len(self.parameters):
            raise ConfigError(f"{self.name} takes {_listed(self.parameters)}; {list(given)} does not fit")
        return tuple(_range_of(self, p, value)[0] for p, value in zip(self.parameters, given))


class Choice(NamedTuple):
    """A task as a config asks for it."""

    task: Task
    weight: float
    ranges: tuple[tuple[int, int], ...]  # of each parameter, both ends included

    def draw(self, uniform: np.ndarray) -> Values:
        """Values of the parameters from numbers in [0, 1), one each."""
        drawn = zip(self.ranges, np.asarray(uniform, dtype=np.float64).ravel().tolist())
        return tuple(low + min(int(u * (high - low + 1)), high - low) for (low, high), u in drawn)


def _combine(is_answer: Callable[[np.ndarray, Values], np.ndarray], notes: np.ndarray, values: Values, _: int) -> Split:
    chosen = is_answer(notes, values)
    return Split(notes[~chosen], notes[chosen])


def _share(num_notes: int, percent: int) -> int:
    """At least one note, and never all of them."""
    return max(0, min(num_notes - 1, max(1, (num_notes * percent + 50) // 100)))


def _after(notes: np.ndarray, values: Values) -> np.ndarray:
    return np.arange(len(notes)) >= max(_share(len(notes), values[0]), min(1, len(notes)))


def _from_last_start(prompt: np.ndarray, values: Values) -> float:
    return float(prompt["start"][-1]) if len(prompt) else 0.0


def _lengths(notes: np.ndarray) -> np.ndarray:
    return units(notes["end"]) - units(notes["start"])


def _pitches(notes: np.ndarray) -> np.ndarray:
    return notes["pitch"].astype(np.int64)


def _first_by(measure: Callable[[np.ndarray], np.ndarray], sign: int, notes: np.ndarray, values: Values) -> np.ndarray:
    """The share of notes with the least `sign` times `measure`; of equal ones the earlier."""
    chosen = np.zeros(len(notes), dtype=bool)
    chosen[np.argsort(sign * measure(notes), kind="stable")[: _share(len(notes), values[0])]] = True
    return chosen


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
    start, end, height = units(notes["start"]), units(notes["end"]), sign * _pitches(notes)
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


def _in_line(sign: int, notes: np.ndarray, values: Values) -> np.ndarray:
    return line(notes, sign)


def _under_the_top(notes: np.ndarray, values: Values) -> np.ndarray:
    return ~line(notes, 1)


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


def _in_span(notes: np.ndarray, values: Values) -> np.ndarray:
    begin, length = _reachable_span(notes, values)
    start = units(notes["start"])
    is_later = (np.arange(len(notes)) > 0) & (start >= begin * HALF_SECOND)
    chosen = is_later & (start < (begin + length) * HALF_SECOND)
    # A second note that comes after a minute of silence is past every span: then all that follows is the answer.
    return chosen if chosen.any() else is_later


def _span_begins(prompt: np.ndarray, values: Values) -> float:
    return values[0] * HALF_SECOND * UNIT_S


def _disturb_velocity(notes: np.ndarray, values: Values, seed: int) -> Split:
    prompt = notes.copy()
    prompt["velocity"] = (notes["velocity"] + _noise(len(notes), 1, values[0], seed)[:, 0]).clip(1, 127)
    return Split(prompt, notes.copy())


def _disturb_timing(notes: np.ndarray, values: Values, seed: int) -> Split:
    moves = _noise(len(notes), 2, values[0], seed)
    prompt = notes.copy()
    prompt["start"] = np.maximum(units(notes["start"]) + moves[:, 0], 0) * UNIT_S
    prompt["end"] = (units(notes["end"]) + moves[:, 1]) * UNIT_S
    return Split(quantise(prompt), notes.copy())  # which makes what ends too early one unit long


def _noise(num_notes: int, num_values: int, most: int, seed: int) -> np.ndarray:
    """Whole numbers in -most .. most, all equally likely."""
    uniform = Draw(seed, 0, np.arange(num_notes)).uniform("noise", num_values)
    return (uniform * (2 * most + 1)).astype(np.int64) - most


_PERCENT = (Parameter("percent", 5, 100, (5, 100), "Share of the notes that is the answer; one note always stays."),)
_MASKS = {
    "high_notes": (partial(_first_by, _pitches, -1), "The highest notes are missing."),
    "low_notes": (partial(_first_by, _pitches, 1), "The lowest notes are missing."),
    "short_notes": (partial(_first_by, _lengths, 1), "The shortest notes are missing."),
    "long_notes": (partial(_first_by, _lengths, -1), "The longest notes are missing."),
}
_PROMPT = Parameter("percent", 5, 95, (10, 90), "Share of the notes that is the prompt.", "after {:g} percent")
_SPAN = (
    Parameter("from", 0, MOST_PARAMETER, (0, MOST_PARAMETER), "Where the span begins, in half seconds; one past the "
              "end of the piece is wrapped round, one without notes moved.", "from {:g} s", 0.5),
    Parameter("length", 1, MOST_PARAMETER, (2, 16), "How long it is, in half seconds.", "{:g} s long", 0.5),
)  # fmt: skip
_LOUDNESS = Parameter("amount", 1, 127, (10, 60), "How far velocities are off at most.", "off by up to {:g}")
_TIMING = Parameter(
    "amount", 1, 127, (2, 30), "How far starts and ends are off at most, in hundredths of a second.",
    "off by up to {:g} s", UNIT_S,
)  # fmt: skip
_ALL = (
    Task("continuation", "combine", "The piece breaks off.", (_PROMPT,), partial(_combine, _after), _from_last_start),
    Task("top_line", "combine", "The melody is missing.", (), partial(_combine, partial(_in_line, 1))),
    Task("bottom_line", "combine", "The bass is missing.", (), partial(_combine, partial(_in_line, -1))),
    *(Task(name, "combine", doc, _PERCENT, partial(_combine, mask)) for name, (mask, doc) in _MASKS.items()),
    Task("infill", "combine", "All that starts in a span of time is missing.", _SPAN,
         partial(_combine, _in_span), _span_begins, _reachable_span),
    Task("velocity_denoising", "replace", "The loudness of each note is off.", (_LOUDNESS,), _disturb_velocity),
    Task("timing_denoising", "replace", "Starts and ends of the notes are off.", (_TIMING,), _disturb_timing),
    Task("harmonise", "combine", "All but the melody is missing.", (), partial(_combine, _under_the_top)),
)  # fmt: skip
TASKS: dict[str, Task] = {task.name: task for task in _ALL}
assert tuple(TASKS) == TASK_NAMES  # each has its token


def find(name: str) -> Task:
    """The task of this name; raises ConfigError with the nearest one."""
    if name not in TASKS:
        raise ConfigError(f"{one_line(name)} is not a task{_near(name, TASKS)} (there are: {', '.join(TASKS)})")
    return TASKS[name]


def parse(tasks: object) -> list[Choice]:
    """The choices of a config's `tasks`; raises ConfigError for what cannot be."""
    if tasks in ("all", "TODO"):  # TODO stands where somebody has not decided yet
        return [_choice(task, {}) for task in _ALL]
    entries = [tasks] if isinstance(tasks, (str, Mapping)) else tasks
    if not isinstance(entries, (list, tuple)):
        raise ConfigError(
            f"tasks is {one_line(tasks)}; write all, a name, or a list of names and {{name, weight, ...}}"
        )
    if not entries:
        raise ConfigError("tasks is empty; name at least one task, or write all")
    choices: list[Choice] = []
    for entry in entries:
        choice = _read(entry)
        if any((choice.task, choice.ranges) == (other.task, other.ranges) for other in choices):
            raise ConfigError(f"tasks: {choice.task.name} is there twice with the same parameters; raise its weight")
        choices.append(choice)
    return choices


def _read(entry: object) -> Choice:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping):
        raise ConfigError(f"tasks has {one_line(entry)}; an entry is a name, or {{name, weight, parameters}}")
    name = entry.get("name")
    if not isinstance(name, str):
        what = "has no name" if name is None else "has a name that is no text"
        raise ConfigError(f"tasks: {one_line(dict(entry))} {what}; write {{name: infill, weight: 2, length: [4, 16]}}")
    if name in ("all", "TODO"):
        raise ConfigError(f"tasks: {name} stands alone, not in a list; write tasks={name}, or list the names you want")
    if name not in TASKS and "," in name:
        raise ConfigError(f"tasks: {one_line(name)} is not a task; several are written as a list: [{one_line(name)}]")
    try:
        return _choice(find(name), {key: value for key, value in entry.items() if key != "name"})
    except ConfigError as error:
        raise ConfigError(f"tasks: {error}") from None


def _choice(task: Task, given: Mapping[object, object]) -> Choice:
    known = [p.name for p in task.parameters]
    for key in given:
        if key not in ("weight", *known):
            hint = _near(str(key), [*known, "weight"])
            raise ConfigError(f"{task.name} has no parameter {one_line(key)}{hint} (it has {_listed(task.parameters)})")
    weight = given.get("weight", 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not (weight > 0 and math.isfinite(weight)):
        raise ConfigError(
            f"weight of {task.name} is {one_line(weight)}; it must be a number above 0 (to never ask, leave it out)"
        )
    ranges = (_range_of(task, p, given[p.name]) if p.name in given else p.usual for p in task.parameters)
    return Choice(task, float(weight), tuple(ranges))


def _range_of(task: Task, parameter: Parameter, value: object) -> tuple[int, int]:
    what = f"{parameter.name} of {task.name} is {one_line(value)}"
    ends = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(ends) != 2 or not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
        raise ConfigError(f"{what}; it must be a whole number, or two as a range [low, high]")
    low, high = ends
    if low > high:
        raise ConfigError(f"{what}; the lower end comes first: [{high}, {low}]")
    if low < parameter.low or high > parameter.high:
        raise ConfigError(f"{what}; it can be {parameter.low} to {parameter.high}")
    return low, high


def _listed(parameters: Sequence[Parameter]) -> str:
    return ", ".join(p.name for p in parameters) or "no parameters"


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""

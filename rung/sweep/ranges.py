"""What a search may try: the `search` part of a sweep file, read and checked before anything starts.

```yaml
search:
  trials: 20
  metric: validation/loss
  direction: lower            # or higher
  sampler: tpe                # or random, grid
  seed: 0
  space:
    lr.learning_rate: {low: 1e-4, high: 1e-2, log: true}
    model.n_layer: {low: 2, high: 6, step: 2}
    lr.schedule: [cosine, wsd]
```

Whether the recipe takes the keys is left to the command line, which asks it at both ends. Needs no Optuna.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rung.errors import ConfigError
from rung.text import one_line

SAMPLERS = ("tpe", "random", "grid")
DIRECTIONS = ("lower", "higher")
_KEYS = ("trials", "metric", "direction", "sampler", "seed", "space")
_MOST_TRIALS = 100_000


@dataclass(frozen=True)
class Range:
    """Numbers from low to high; whole ones where low, high and step are."""

    low: float
    high: float
    step: float | None
    is_log: bool

    @property
    def is_whole(self) -> bool:
        return all(isinstance(value, int) for value in (self.low, self.high, 0 if self.step is None else self.step))

    @property
    def num_values(self) -> int:
        """How many there are, by steps."""
        return math.floor((self.high - self.low) / (self.step or 1) + 1e-9) + 1

    def value(self, number: int) -> float:
        return self.low + number * (self.step or 1)


Choices = tuple[Any, ...]


@dataclass(frozen=True)
class Settings:
    """The `search` part of a sweep file."""

    trials: int
    metric: str
    direction: str
    sampler: str
    seed: int
    space: Mapping[str, Range | Choices]

    @property
    def num_combinations(self) -> int:
        """Of a grid."""
        return math.prod(len(one) if isinstance(one, tuple) else one.num_values for one in self.space.values())

    def combination(self, number: int) -> dict[str, Any]:
        """One of a grid, the last key moving fastest; choices by their place in the list."""
        found: dict[str, Any] = {}
        for name, one in reversed(list(self.space.items())):
            number, place = divmod(number, len(one) if isinstance(one, tuple) else one.num_values)
            found[name] = place if isinstance(one, tuple) else one.value(place)
        return found


def read_settings(tree: Mapping[str, Any]) -> Settings:
    """Checks the `search` part of a sweep file; all that is wrong with it at once."""
    wrong = [_unknown("search", name, _KEYS) for name in tree if name not in _KEYS]
    metric, space = tree.get("metric"), tree.get("space")
    if not isinstance(metric, str) or "/" not in metric:
        wrong.append("search: metric is missing or no set/name; write `metric: validation/loss`")
    trials, seed = tree.get("trials", 20), tree.get("seed", 0)
    if not _is_int(trials) or not 1 <= trials <= _MOST_TRIALS:
        wrong.append(f"search: trials={one_line(trials)} is no whole number from 1 to {_MOST_TRIALS}")
    if not _is_int(seed) or seed < 0:
        wrong.append(f"search: seed={one_line(seed)} is no whole number from 0 on")
    direction, sampler = tree.get("direction", "lower"), tree.get("sampler", "tpe")
    for name, value, known in (("direction", direction, DIRECTIONS), ("sampler", sampler, SAMPLERS)):
        if value not in known:
            wrong.append(f"search: {name}={one_line(value)} is not one of {', '.join(known)}")
    if not isinstance(space, dict) or not space:
        wrong.append("search: space is missing; name what to search, as in `lr.learning_rate: {low: 1e-4, high: 1e-2}`")
        space = {}
    found: dict[str, Range | Choices] = {}
    for name, given in space.items():
        try:
            found[str(name)] = _dimension(str(name), given, sampler == "grid")
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return Settings(trials, str(metric), direction, sampler, seed, found)


def _dimension(name: str, given: Any, is_grid: bool) -> Range | Choices:
    if isinstance(given, list):
        if not given:
            raise ConfigError(f"search: {name} has no values; give at least one")
        return tuple(given)
    if not isinstance(given, dict):
        raise ConfigError(f"search: {name} must be a list of values or {{low: .., high: ..}}, not {one_line(given)!r}")
    for key in given:
        if key not in ("low", "high", "step", "log"):
            raise ConfigError(_unknown(f"search: {name}", key, ("low", "high", "step", "log")))
    low, high, step = (_number(name, key, given.get(key)) for key in ("low", "high", "step"))
    is_log = given.get("log", False)
    if low is None or high is None or low >= high:
        raise ConfigError(f"search: {name} needs a low below its high, not {given.get('low')} and {given.get('high')}")
    if not isinstance(is_log, bool) or (is_log and (low <= 0 or step is not None)):
        raise ConfigError(f"search: {name}: log is true or false, and takes a low above 0 and no step")
    if step is not None and step <= 0:
        raise ConfigError(f"search: {name}: step={step} is not above 0")
    found = Range(low, high, step, is_log)
    if is_grid and (is_log or (step is None and not found.is_whole)):
        raise ConfigError(f"search: {name} has no end of values; sampler=grid takes a list, or a step")
    return found


def _number(name: str, key: str, value: Any) -> Any:
    """As a number: YAML reads 1e-4 as text."""
    if value is None or _is_int(value):
        return value
    try:
        if not isinstance(value, bool) and math.isfinite(number := float(value)):
            return number
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"search: {name}: {key}={one_line(value)} is no number")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unknown(where: str, name: Any, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"{where}: {one_line(name)} is not a key; {hint}"

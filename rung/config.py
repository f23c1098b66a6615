"""One typed tree of keys per run: defaults, a preset, files, dotted overrides; who set and who read each value.

Each part of rung declares its own keys as a dataclass with `key(default, doc)`. The tree of a run is the union of the
engine's keys and the recipe's; both may own keys of one section (`data.batch_size` is the engine's,
`data.context_size` the recipe's), and each owner gets back an object of its own type.

The surprising thing: the objects handed out are of generated subclasses that note each leaf they are asked for, so that
a key that nothing reads can be reported. Printing the tree does not count as reading it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rung.errors import ConfigError
from rung.units import Budget

REFERENCE = re.compile(r"\$\{([A-Za-z0-9_.]+)\}")


def key(default: Any, doc: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A key: its default, its one documented line (meaning, unit, effect of the odd value), its range."""
    metadata = {"doc": doc, "low": low, "high": high}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, doc: str) -> Any:
    """A group of keys, declared by a dataclass of its own."""
    return field(default_factory=kind, metadata={"doc": doc})


@dataclass(frozen=True)
class Key:
    """What is known of one leaf before anybody has set it."""

    name: str  # dotted
    kind: Any
    default: Any
    doc: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Layer:
    """Values from one place; later layers win."""

    source: str
    tree: Mapping[str, Any]


class Config:
    """The resolved tree of a run. `view(owner)` gives an owner its typed, read-recording part."""

    def __init__(self, schema: Schema, values: dict[str, Any], sources: dict[str, str]) -> None:
        self.schema = schema
        self.values = values
        self.sources = sources
        self.reads: set[str] = set()

    def view(self, owner: str) -> Any:
        return _build(self.schema.owners[owner], "", self.values, self.reads)

    def tree(self) -> dict[str, Any]:
        """Plain nested values, as they are written to config.yaml."""
        tree: dict[str, Any] = {}
        for name, value in self.values.items():
            *sections, last = name.split(".")
            place = tree
            for part in sections:
                place = place.setdefault(part, {})
            place[last] = str(value) if isinstance(value, Budget) else value
        return tree

    def unread(self) -> list[str]:
        """Keys that somebody set and nothing has asked for; a default that refers to another key is nobody's."""
        nobody = ("default", "derived: ")
        return [name for name in self.values if name not in self.reads and not self.sources[name].startswith(nobody)]


class Schema:
    """The keys of a run: those of each owner (the engine, the recipe), laid over each other."""

    def __init__(self, owners: Mapping[str, type], help_verb: str = "rung config RECIPE") -> None:
        self.owners = dict(owners)
        self.help_verb = help_verb
        self.keys: dict[str, Key] = {}
        self.sections: dict[str, str] = {}
        for kind in owners.values():
            for found in _walk(kind, "", self.sections):
                assert found.name not in self.keys, f"{found.name} is declared twice"
                self.keys[found.name] = found

    def resolve(self, layers: Sequence[Layer]) -> Config:
        """Lays the layers over the defaults and checks everything; raises ConfigError with all that is wrong."""
        raw = {name: found.default for name, found in self.keys.items()}
        sources = dict.fromkeys(raw, "default")
        wrong: list[str] = []
        for layer in layers:
            for name, value in self._leaves(layer.tree, "", layer.source, wrong):
                raw[name], sources[name] = value, layer.source
        values: dict[str, Any] = {}
        refused: dict[str, str] = {}
        for name, found in self.keys.items():
            try:
                value, origin = _follow(name, raw)
                values[name] = _in_range(found, _convert(found.kind, value))
                if origin:
                    sources[name] = f"{'derived' if sources[name] == 'default' else sources[name]}: from {origin}"
            except ValueError as error:
                refused[name] = f"{name}={_shown(raw[name])} {error}"
        for name, line in refused.items():  # a default that only repeats another key's mistake is not one more
            if sources[name] != "default" or not any(t in refused for t in REFERENCE.findall(str(raw[name]))):
                wrong.append(line)
        if not wrong:
            for owner in self.owners.values():
                wrong += _rules(_build(owner, "", values, None))
        if wrong:
            raise ConfigError("\n".join(wrong))
        return Config(self, values, sources)

    def _leaves(self, tree: Mapping[str, Any], prefix: str, source: str, wrong: list[str]) -> Iterator[tuple[str, Any]]:
        for part, value in tree.items():
            name = f"{prefix}{part}"
            if name in self.keys:
                yield name, value
            elif name in self.sections:
                if isinstance(value, Mapping):
                    yield from self._leaves(value, f"{name}.", source, wrong)
                else:
                    first = next(known for known in self.keys if known.startswith(f"{name}."))
                    wrong.append(f"{name} is a group of keys, not a value; set one of its keys, such as {first}")
            else:
                wrong.append(self._unknown(name, source))

    def _unknown(self, name: str, source: str) -> str:
        by_last: dict[str, str] = {}
        for known in self.keys:
            by_last.setdefault(known.rpartition(".")[2], known)
        near = difflib.get_close_matches(name, list(self.keys), n=1, cutoff=0.7)
        near += [by_last[m] for m in difflib.get_close_matches(name.rpartition(".")[2], list(by_last), n=1, cutoff=0.7)]
        hint = f"; did you mean {near[0]}?" if near else ""
        where = f" (in {source})" if source.startswith(("file", "preset")) else ""
        return f"{name} is not a key{where}{hint} ({self.help_verb} lists all keys)"


def load_file(path: Path) -> dict[str, Any]:
    """A YAML file as a plain tree, references unresolved. OmegaConf's loader reads 8e-5 as a number; PyYAML's not."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold keys and values, not a {type(tree).__name__}")
    return typing.cast(dict[str, Any], tree)


def parse_overrides(words: Iterable[str]) -> dict[str, Any]:
    """`a.b=1` words as a tree. Values are YAML: 1e-4, true, null, [1, 2], text."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    tree: dict[str, Any] = {}
    seen: set[str] = set()
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9_.]+", name):
            raise ConfigError(f"{word!r} is not an override; write key=value, such as lr.learning_rate=1e-4")
        try:
            one = OmegaConf.to_container(OmegaConf.from_dotlist([word]), resolve=False)
        except (YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"{word!r} has a value that is not valid YAML: {' '.join(str(error).split())}") from None
        given = typing.cast(dict[str, Any], one)
        leaves = {leaf for leaf, _ in _flatten(given, "")}
        if any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in leaves for b in seen):
            raise ConfigError(f"{name} is given twice on the command line; keep one")
        seen |= leaves
        _merge(tree, given)
    return tree


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ between two trees, with both values; a missing one is shown as None."""
    flat = [dict(_flatten(tree, "")) for tree in (before, after)]
    names = [*flat[0], *(name for name in flat[1] if name not in flat[0])]
    return {name: (flat[0].get(name), flat[1].get(name)) for name in names if flat[0].get(name) != flat[1].get(name)}


def _flatten(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for part, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{part}.")
        else:
            yield f"{prefix}{part}", value


def _merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    for part, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(part), dict):
            _merge(tree[part], value)
        else:
            tree[part] = value


def _walk(kind: type, prefix: str, sections: dict[str, str]) -> Iterator[Key]:
    hints = _hints(kind)
    for f in dataclasses.fields(kind):
        name = f"{prefix}{f.name}"
        if dataclasses.is_dataclass(hints[f.name]) and hints[f.name] is not Budget:
            sections.setdefault(name, f.metadata.get("doc", ""))
            yield from _walk(typing.cast(type, hints[f.name]), f"{name}.", sections)
        else:
            assert "doc" in f.metadata, f"{name} has no documented line; declare it with rung.config.key"
            made = f.default_factory
            default = f.default if made is dataclasses.MISSING else made()
            yield Key(name, hints[f.name], default, f.metadata["doc"], f.metadata["low"], f.metadata["high"])


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _follow(name: str, raw: Mapping[str, Any]) -> tuple[Any, str]:
    """The value of a key with its ${references} replaced, and what it was taken from."""
    origins: list[str] = []

    def look_up(current: str, trail: tuple[str, ...]) -> Any:
        return fill(raw[current], current, trail)

    def fill(value: Any, current: str, trail: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [fill(v, current, trail) for v in value]
        if isinstance(value, dict):
            return {k: fill(v, current, trail) for k, v in value.items()}
        if not isinstance(value, str):
            return value
        if "${" in REFERENCE.sub("", value):
            raise ValueError("has a ${ that is not a reference to a key; write ${a.b}")

        def replace(match: re.Match[str]) -> Any:
            target = match.group(1)
            if target in (*trail, current):
                raise ValueError(f"refers to itself through {' -> '.join((*trail, current, target))}")
            if target not in raw:
                near = difflib.get_close_matches(target, list(raw), n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"refers to {target}, which is not a key{hint}")
            if not trail:
                origins.append(target)
            return look_up(target, (*trail, current))

        whole = REFERENCE.fullmatch(value)
        return replace(whole) if whole else REFERENCE.sub(lambda match: str(replace(match)), value)

    return look_up(name, ()), ", ".join(origins)


def _convert(kind: Any, value: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(a for a in args if a is not type(None)), value)
    if origin is Literal:
        if value not in args:
            near = difflib.get_close_matches(str(value), [str(a) for a in args], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"is not one of {', '.join(map(str, args))}{hint}")
        return value
    if origin is list:
        if not isinstance(value, list):
            raise ValueError("is not a list; write [a, b]")
        return [_convert(args[0], v) for v in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError("is not a mapping; write {name: value}")
        return {k: _convert(args[1], v) for k, v in value.items()}
    if kind is Any:
        return value
    if kind is Budget:
        return Budget.parse(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 3e5 is how people write 300000
    if kind is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)  # a name such as 2024
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ValueError(f"is not {words.get(kind, kind)}")
    return value


def _in_range(found: Key, value: Any) -> Any:
    numbers = value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]
    for number in numbers:
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        if not math.isfinite(number):
            raise ValueError("is not a finite number")
        if found.low is not None and number < found.low:
            raise ValueError(f"is too small; the limit is {found.low:g}")
        if found.high is not None and number > found.high:
            raise ValueError(f"is too large; the limit is {found.high:g}")
    return value


def _shown(value: Any) -> str:
    return str(value) if not isinstance(value, str) or value else "''"


def _rules(view: Any) -> list[str]:
    """What an owner's `check` has against a combination of values; sections are asked too."""
    wrong = []
    for f in dataclasses.fields(view):
        value = getattr(view, f.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Budget):
            wrong += _rules(value)
    return wrong + list(view.check() if hasattr(view, "check") else ())


def _build(kind: type, prefix: str, values: Mapping[str, Any], reads: set[str] | None) -> Any:
    """An object of this dataclass with these values, recording into `reads` unless that is None."""
    hints = _hints(kind)
    view: Any = object.__new__(_recording(kind, prefix) if reads is not None else kind)
    state = view.__dict__
    state["_reads"] = reads
    for f in dataclasses.fields(kind):
        name = f"{prefix}{f.name}"
        if dataclasses.is_dataclass(hints[f.name]) and hints[f.name] is not Budget:
            state[f.name] = _build(typing.cast(type, hints[f.name]), f"{name}.", values, reads)
        else:
            state[f.name] = values[name]
    return view


@functools.cache
def _recording(kind: type, prefix: str) -> type:
    """A subclass whose leaves are read-only properties that note their own name when fetched."""

    def leaf(name: str) -> property:
        dotted = f"{prefix}{name}"

        def fetch(self: Any) -> Any:
            self.__dict__["_reads"].add(dotted)
            return self.__dict__[name]

        return property(fetch)

    hints = _hints(kind)
    leaves = {
        f.name: leaf(f.name)
        for f in dataclasses.fields(kind)
        if not dataclasses.is_dataclass(hints[f.name]) or hints[f.name] is Budget
    }

    def refuse(self: Any, name: str, *_: Any) -> None:
        raise AttributeError(f"{prefix}{name} cannot be set: a resolved config is read-only")

    own = {"__repr__": lambda self: f"<{kind.__name__} {prefix}*>", "__setattr__": refuse, "__delattr__": refuse}
    return type(kind.__name__, (kind,), {**leaves, **own})

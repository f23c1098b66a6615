"""One typed tree of keys per run: defaults, a preset, files, dotted overrides; who set and who read each value.

Each part of rung declares its own keys as a dataclass with `key(default, doc)`. Two owners may have keys in one section
(`data.batch_size` is the engine's, `data.context_size` the recipe's); each gets back an object of its own type, which
records what is read, so that keys without effect can be reported. Printing the tree does not count as reading it.
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

from rung import parse
from rung.errors import ConfigError
from rung.units import Budget

# What a YAML loader raises besides its own errors: at a date such as 2026-02-31, a number of 5,000 digits.
_OF_VALUES = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
MOST_REFERENCES = 1000  # that one value leads to: each may name others twice, which doubles its text at every step
REFERENCE = re.compile(r"\$\{([A-Za-z0-9_.]+)\}")


def key(default: Any, doc: str, *, low: float | None = None, high: float | None = None, alias: str = "") -> Any:
    """A key: its default, its one documented line (meaning, unit, effect of special values), its range. `alias`: what
    other trainers call it in the same section; read as this key, and reported."""
    metadata = {"doc": doc, "low": low, "high": high, "alias": alias}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(kind: type, doc: str, is_late: bool = False) -> Any:
    """A group of keys, declared by a dataclass of its own. `is_late`: nothing reads them before the first sample, save
    or failed step, so that one that is not read yet may still have an effect."""
    return field(default_factory=kind, metadata={"doc": doc, "is_late": is_late})


@dataclass(frozen=True)
class Key:
    """What is known of one leaf before anybody has set it."""

    name: str  # dotted
    kind: Any
    default: Any
    doc: str
    low: float | None = None
    high: float | None = None
    is_late: bool = False  # see section
    alias: str = ""  # dotted; another name that is read as this one


@dataclass(frozen=True)
class Layer:
    """Values from one place; later layers win."""

    source: str
    tree: Mapping[str, Any]


class Config:
    """The resolved tree of a run. `view(owner)` gives an owner its typed, read-recording part."""

    def __init__(
        self, schema: Schema, values: dict[str, Any], sources: dict[str, str], aliased: Mapping[str, str] = {}
    ) -> None:
        self.schema = schema
        self.values = values
        self.sources = sources
        self.aliased = dict(aliased)  # key -> the other name under which it was set
        self.reads: set[str] = set()

    def view(self, owner: str) -> Any:
        return _build(self.schema.owners[owner], "", self.values, self.reads)

    def tree(self) -> dict[str, Any]:
        """Plain nested values, as they are written to config.yaml."""
        return nest({name: str(value) if isinstance(value, Budget) else value for name, value in self.values.items()})

    def unread(self) -> list[str]:
        """Keys that were set and have no effect; a default that refers to another key was not set."""
        not_set = ("default", "derived: ")
        asked = [name for name in self.values if name not in self.reads and not self.schema.keys[name].is_late]
        return [name for name in asked if not self.sources[name].startswith(not_set)]


class Schema:
    """The keys of a run: those of each owner (the engine, the recipe), laid over each other."""

    def __init__(self, owners: Mapping[str, type], help_verb: str = "rung config RECIPE") -> None:
        self.owners = dict(owners)
        self.help_verb = help_verb
        self.keys: dict[str, Key] = {}
        self.sections: dict[str, str] = {}
        self.aliases: dict[str, str] = {}
        for kind in owners.values():
            for found in _walk(kind, "", self.sections):
                assert found.name not in self.keys, f"{found.name} is declared twice"
                self.keys[found.name] = found
                if found.alias:
                    self.aliases[found.alias] = found.name

    def resolve(self, layers: Sequence[Layer]) -> Config:
        """Lays the layers over the defaults and checks everything; raises ConfigError with all that is wrong."""
        raw = {name: found.default for name, found in self.keys.items()}
        sources = dict.fromkeys(raw, "default")
        wrong: list[str] = []
        aliased: dict[str, str] = {}
        for layer in layers:
            given: dict[str, str] = {}  # key -> what this layer calls it
            for written, value in self._leaves(layer.tree, "", layer.source, wrong):
                name = self.aliases.get(written, written)
                if name in given:
                    message = f"{name} is given twice, as {given[name]} and as {written}; keep one of them"
                    raise ConfigError(message, code="options-conflict")
                given[name] = written
                raw[name], sources[name] = value, layer.source
            aliased |= given
        code = "no-key" if wrong else "bad-value"
        values: dict[str, Any] = {}
        refused: dict[str, str] = {}
        for name, found in self.keys.items():
            try:
                value, origin = _follow(name, raw)
                values[name] = _convert(found.kind, value)
                _check_range(found, values[name])
                if origin:
                    sources[name] = f"{'derived' if sources[name] == 'default' else sources[name]}: from {origin}"
            except ValueError as error:
                shown = "''" if raw[name] == "" else raw[name]
                refused[name] = f"{name}={shown} {error}"
        for name, line in refused.items():  # a default that only repeats another key's mistake is not one more
            if sources[name] != "default" or not any(t in refused for t in REFERENCE.findall(str(raw[name]))):
                wrong.append(line)
        if not wrong:
            code = "options-conflict"
            for owner in self.owners.values():
                wrong += _rules(_build(owner, "", values, None))
        if wrong:
            raise ConfigError("\n".join(wrong), code=code)
        return Config(self, values, sources, {name: alias for name, alias in aliased.items() if name != alias})

    def _leaves(self, tree: Mapping[str, Any], prefix: str, source: str, wrong: list[str]) -> Iterator[tuple[str, Any]]:
        for part, value in tree.items():
            name = f"{prefix}{part}"
            if name in self.keys or name in self.aliases:
                yield name, value
            elif name in self.sections:
                if isinstance(value, Mapping):
                    yield from self._leaves(value, f"{name}.", source, wrong)
                else:
                    first = next(known for known in self.keys if known.startswith(f"{name}."))
                    wrong.append(f"{name} is a group of keys, not a value; set one of its keys, such as {first}")
            else:
                last = name.rpartition(".")[2]
                by_last = {known.rpartition(".")[2]: known for known in reversed(self.keys)}
                is_file = source.startswith(("file", "preset"))
                inner = next(iter(value), "") if isinstance(value, Mapping) else None
                groups = self.sections if inner is not None else ()
                near = [
                    f"{one}:" if is_file else f"{one}.{inner}"
                    for one in difflib.get_close_matches(name, groups, n=1, cutoff=0.7)
                ]
                near += difflib.get_close_matches(name, list(self.keys), n=1, cutoff=0.7)
                near += [by_last[m] for m in difflib.get_close_matches(last, list(by_last), n=1, cutoff=0.7)]
                hint = f"; did you mean {near[0]}?" if near else ""
                where = f" (in {source})" if is_file else ""
                wrong.append(f"{name} is not a key{where}{hint} ({self.help_verb} lists all keys)")


def load_file(path: Path) -> dict[str, Any]:
    """A YAML file as a plain tree, references unresolved. OmegaConf's loader reads 8e-5 as a number; PyYAML's not."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        tree = OmegaConf.to_container(OmegaConf.load(parse.checked_yaml(parse.read_bytes(path))), resolve=False)
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}", code="no-file") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", code="cannot-read") from error
    except (YAMLError, OmegaConfBaseException, *_OF_VALUES) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}", code="bad-file") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold keys and values, not a {type(tree).__name__}", code="bad-file")
    return typing.cast(dict[str, Any], tree)


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`a.b=1` words as a tree. Values are YAML: 1e-4, true, null, [1, 2], text."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    tree: dict[str, Any] = {}
    seen: set[str] = set()
    for word in overrides:
        name, equals, _ = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9_.]+", name):
            raise ConfigError(
                f"{word!r} is not an override; write key=value, such as lr.learning_rate=1e-4", code="bad-override"
            )
        try:
            parse.checked_yaml(word.partition("=")[2])
            one = OmegaConf.to_container(OmegaConf.from_dotlist([word]), resolve=False)
        except (YAMLError, OmegaConfBaseException, *_OF_VALUES) as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"{word!r} has a value that is not valid YAML: {text}", code="bad-value") from None
        given = typing.cast(dict[str, Any], one)
        leaves = {leaf for leaf, _ in _flatten(given, "")}
        if any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in leaves for b in seen):
            raise ConfigError(f"{name} is given twice on the command line; keep one", code="options-conflict")
        seen |= leaves
        merge(tree, given)
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


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted names as a tree: {"a.b": 1} is {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        place = tree
        for part in sections:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def merge(tree: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Lays `other` over the tree, in place."""
    for part, value in other.items():
        if isinstance(value, dict) and isinstance(tree.get(part), dict):
            merge(tree[part], value)
        else:
            tree[part] = value


def _walk(kind: type, prefix: str, sections: dict[str, str], is_late: bool = False) -> Iterator[Key]:
    for f, hint, is_section in _fields(kind):
        name = f"{prefix}{f.name}"
        if is_section:
            sections.setdefault(name, f.metadata.get("doc", ""))
            yield from _walk(hint, f"{name}.", sections, is_late or f.metadata.get("is_late", False))
        else:
            assert "doc" in f.metadata, f"{name} has no documented line; declare it with rung.config.key"
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            alias = f"{prefix}{f.metadata['alias']}" if f.metadata["alias"] else ""
            yield Key(name, hint, default, f.metadata["doc"], f.metadata["low"], f.metadata["high"], is_late, alias)


@functools.cache
def _fields(kind: type) -> list[tuple[dataclasses.Field[Any], Any, bool]]:
    """The fields of a dataclass with their types, and whether each is a group of keys."""
    hints = typing.get_type_hints(kind)
    return [
        (f, hints[f.name], dataclasses.is_dataclass(hints[f.name]) and hints[f.name] is not Budget)
        for f in dataclasses.fields(kind)
    ]


def _follow(name: str, raw: Mapping[str, Any]) -> tuple[Any, str]:
    """The value of a key with its ${references} replaced, and what it was taken from."""
    origins: list[str] = []
    num_followed = 0

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
            nonlocal num_followed
            num_followed += 1
            if num_followed > MOST_REFERENCES:
                raise ValueError(f"leads to more than {MOST_REFERENCES} references")
            target = match.group(1)
            if target in (*trail, current):
                raise ValueError(f"refers to itself through {' -> '.join((*trail, current, target))}")
            if target not in raw:
                near = difflib.get_close_matches(target, list(raw), n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"refers to {target}, which is not a key{hint}")
            if not trail:
                origins.append(target)
            return fill(raw[target], target, (*trail, current))

        whole = REFERENCE.fullmatch(value)
        return replace(whole) if whole else REFERENCE.sub(lambda match: str(replace(match)), value)

    return fill(raw[name], name, ()), ", ".join(origins)


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
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ValueError(f"is not {names.get(kind, kind)}")
    return value


def _check_range(found: Key, value: Any) -> None:
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


def _rules(view: Any) -> list[str]:
    """What an owner's `check` has against a combination of values; sections are asked too."""
    kind: type = type(view)
    wrong = [line for f, _, is_section in _fields(kind) if is_section for line in _rules(getattr(view, f.name))]
    return wrong + list(view.check() if hasattr(view, "check") else ())


def _build(kind: type, prefix: str, values: Mapping[str, Any], reads: set[str] | None) -> Any:
    """An object of this dataclass with these values, recording into `reads` unless that is None."""
    view: Any = object.__new__(_recording(kind, prefix) if reads is not None else kind)
    view.__dict__["_reads"] = reads
    for f, hint, is_section in _fields(kind):
        name = f"{prefix}{f.name}"
        view.__dict__[f.name] = _build(hint, f"{name}.", values, reads) if is_section else values[name]
    return view


@functools.cache
def _recording(kind: type, prefix: str) -> type:
    """A subclass whose leaves are read-only properties that note their own name when fetched."""

    def leaf(name: str) -> property:
        def fetch(self: Any) -> Any:
            self.__dict__["_reads"].add(f"{prefix}{name}")
            return self.__dict__[name]

        return property(fetch)

    leaves = {f.name: leaf(f.name) for f, _, is_section in _fields(kind) if not is_section}

    def refuse(self: Any, name: str, *_: Any) -> None:
        raise AttributeError(f"{prefix}{name} cannot be set: a resolved config is read-only")

    own = {"__repr__": lambda self: f"<{kind.__name__} {prefix}*>", "__setattr__": refuse, "__delattr__": refuse}
    return type(kind.__name__, (kind,), {**leaves, **own})

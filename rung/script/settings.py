"""The configuration of a script of one's own: a tree that reads as attributes and as items, and knows who set a value.

Anything that is a mapping of names to values will do: a dict, a dataclass, what argparse returns, OmegaConf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from rung.errors import UserError

SCRIPT, COMMAND_LINE = "script", "command line"
Changed = Callable[[dict[str, Any]], None]  # is told of dotted keys and their new values


def tree_of(config: Any) -> dict[str, Any]:
    """A tree of dicts out of whatever holds names and values."""
    if config is None:
        return {}
    if _is_record(config):
        config = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    elif type(config).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(config, resolve=True)
    elif not isinstance(config, Mapping):
        try:
            config = vars(config)
        except TypeError:
            raise UserError(
                f"config={config!r} has no names and values; pass a dict, a dataclass, argparse's result or OmegaConf.",
                code="bad-config",
            ) from None
    return {
        str(name): tree_of(value) if isinstance(value, Mapping) or _is_record(value) else value
        for name, value in config.items()
    }


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def source_of(key: str, words: Sequence[str]) -> str:
    """Whether a value came with the command line: `--key`, `--key=..` or `key=..`."""
    for word in words[1:]:
        name, equals, _ = word.partition("=")
        is_option = name.startswith("-") or bool(equals)
        if is_option and name.lstrip("-").replace("-", "_") == key.replace("-", "_"):
            return COMMAND_LINE
    return SCRIPT


@dataclasses.dataclass
class Reads:
    """Keys that a script has read, and whether it says that it reads all of its settings so."""

    keys: set[str] = dataclasses.field(default_factory=set)
    is_complete: bool = False


class Settings(MutableMapping[str, Any]):
    """`config.lr`, `config["lr"]`, `config.model.n_layer`; a change is told to the run."""

    def __init__(self, tree: dict[str, Any], changed: Changed, prefix: str = "", reads: Reads | None = None) -> None:
        self.__dict__.update(_tree=tree, _changed=changed, _prefix=prefix, _reads=Reads() if reads is None else reads)

    def __getitem__(self, name: str) -> Any:
        value, key = self._tree[name], f"{self._prefix}{name}"
        if isinstance(value, dict):
            return Settings(value, self._changed, f"{key}.", self._reads)
        self._reads.keys.add(key)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._tree:
            raise AttributeError(f"the config has no {self._prefix}{name}; it has {', '.join(self._tree) or 'nothing'}")
        return self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __setattr__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        del self._tree[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __repr__(self) -> str:
        return repr(self._tree)

    def update(self, values: Any = (), /, allow_val_change: bool = True, **more: Any) -> None:
        """`allow_val_change` is for scripts that come from wandb; changes are always allowed, and always recorded."""
        new = tree_of(dict(values) if isinstance(values, list | tuple) else values) | tree_of(more)
        before = dict(dotted(self._tree))
        _merge(self._tree, new)
        # Told only of what is another value now: Lightning says all hyperparameters again for `test` after `fit`.
        changed = {key: value for key, value in dotted(new) if key not in before or not _is_same(before[key], value)}
        if changed:
            self._changed({f"{self._prefix}{key}": value for key, value in changed.items()})

    def setdefaults(self, values: Any) -> None:
        """Values for names that have none yet."""
        self.update({name: value for name, value in tree_of(values).items() if name not in self._tree})

    def as_dict(self) -> dict[str, Any]:
        self._reads.keys.update(f"{self._prefix}{key}" for key, _ in dotted(self._tree))
        return tree_of(self._tree)

    def check_read(self) -> None:
        """Says that the script reads its settings from here alone: one that it has not read by the end does nothing."""
        self._reads.is_complete = True


def _is_same(old: Any, new: Any) -> bool:
    if old is new and isinstance(old, list | dict | set):  # it may have been changed in place
        return False
    try:
        return type(old) is type(new) and bool(old == new)
    except Exception:  # values of any kind, such as arrays of several numbers
        return False


def _merge(tree: dict[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(tree.get(name), dict):
            _merge(tree[name], value)
        else:
            tree[name] = value

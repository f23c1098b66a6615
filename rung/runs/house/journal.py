"""A move that is under way: `<runs>/.moving.json` says what is to be done, from before the first step to the last.

While it is there, nobody else keeps house. Doing what it says is left to moving.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rung.errors import RunError
from rung.runs.files import from_json, write_json
from rung.runs.house.places import ID
from rung.runs.house.refs import Renamed

JOURNAL = ".moving.json"


@dataclass(frozen=True)
class Move:
    """One run: from which id to which, and the new names of its snapshots."""

    old: str
    new: str
    refs: list[Renamed] = field(default_factory=list)
    stay: list[str] = field(default_factory=list)  # snapshots that keep their name: their repository is not at hand


@dataclass(frozen=True)
class Moving:
    """What `rung mv` is about: its two words, and all that follows from them."""

    words: tuple[str, str]
    moves: list[Move]
    others: list[str] = field(default_factory=list)  # pages and other files of a renamed experiment
    followed: list[str] = field(default_factory=list)  # runs that named a moved one, once it is done

    @property
    def ids(self) -> dict[str, str]:
        return {move.old: move.new for move in self.moves}


def unfinished(root: Path) -> Moving | None:
    """What a killed `rung mv` has left to do."""
    try:
        told = from_json((root / JOURNAL).read_bytes())
        moves = [Move(m["old"], m["new"], [Renamed(*ref) for ref in m["refs"]]) for m in told["moves"]]
        others = [Path(name).name for name in told["others"]]
        if not moves or not all(ID.fullmatch(name) for move in moves for name in (move.old, move.new)):
            raise ValueError("it does not say which run becomes which")
        return Moving((str(told["words"][0]), str(told["words"][1])), moves, others)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise RunError(f"{root / JOURNAL} is damaged: {error}; look at the runs it names, then delete it.") from None


def refuse_unfinished(root: Path) -> None:
    left = unfinished(root)
    if left is not None:
        raise RunError(f"a move was not finished; `rung mv {left.words[0]} {left.words[1]}` goes on with it.")


def write_journal(root: Path, moving: Moving) -> None:
    moves = [{"old": m.old, "new": m.new, "refs": [list(ref) for ref in m.refs]} for m in moving.moves]
    write_json(root / JOURNAL, {"words": list(moving.words), "moves": moves, "others": moving.others})

"""The plan of a sweep: read from a sweep file, then kept in sweep.json, which is what every process goes by.

The file is strict: an unknown key is an error with the nearest name, and so is a key with two values, an empty grid and
a duplicate point. Whether the recipe takes the keys is checked by the command line. A plan only grows: a point that a
later edit removes stays in sweep.json, marked as retired, because another process may be training it. Config files are
copied beside the plan, so that an edit in the middle of a sweep does not split it in two.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.config import Layer, Schema, key, load_file
from rung.errors import ConfigError, RunError, UserError
from rung.files import write_whole
from rung.parse import mismatch
from rung.runs.files import locked, newer, read_json, refused, write_json
from rung.runs.query import nearest
from rung.runs.record import check_name
from rung.sweep.space import Point, Sweep, make_point, override, split_files
from rung.text import one_line

SCHEMA = 1
SWEEPS = ".sweeps"
CONFIGS = "config"
MOST_POINTS = 10_000  # more are a slip of the keyboard: each is a training
LAUNCH = (
    "on", "threads", "gpus", "mem_gb",  # for every launcher
    "slots",  # on this machine
    "address", "resources",  # on Ray
    "partition", "time", "gpus_per_node", "cpus_per_task", "account", "qos", "array_parallelism", "setup",
    "signal_delay_s", "sbatch",  # on SLURM
    "image", "claim", "mount", "accelerators",  # in files for other clusters
)  # fmt: skip


@dataclass
class SweepFile:
    """The keys of a sweep file."""

    name: str = key("", "What the sweep is called; default: the name of the file.")
    recipe: str = key("", "The recipe to train: piano, text, world, or package.module:Class.")
    preset: str = key("", "The preset that all points start from; default: the recipe's own.")
    config: list[str] = key([], "YAML files of keys for all points, relative to the sweep file.")
    set: dict[str, Any] = key({}, "Keys and values for all points.")
    grid: dict[str, Any] = key({}, "Key -> list of values; every combination is a point.")
    points: list[Any] = key([], "A list of {key: value}; each is a point, combined with the grid if there is one.")
    search: dict[str, Any] = key({}, "A search instead of a grid: trials, metric, space.")
    experiment: str = key("", "The series to file the runs under; default: the name.")
    eval: str = key("", "The split to evaluate each finished run on, such as test; default: none.")
    retries: int = key(1, "How often a training that crashed is started again.", low=0, high=1000)
    ranks: int = key(1, "Processes of one run, under torchrun where more than one.", low=1, high=4096)
    launch: dict[str, Any] = key({}, "Where and how: on, slots, threads, gpus, and what a cluster wants to know.")
    why: str = key("", "What the sweep is to find out; kept with each run.")


_FIELDS = ("name", "recipe", "experiment", "eval_split", "retries", "ranks", "launch", "metric", "search", "why")
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")  # a file is named after it
# Of sweep.json: what its readers rely on.
_SHAPE = {
    "name": str, "recipe": str, "experiment": str, "eval_split": str, "retries": int, "ranks": int, "launch": dict,
    "metric": str, "search": dict, "words": [str],
    "points": [{"key": str, "words": [str], "varies": dict, "run": str, "retired": bool}],
}  # fmt: skip
_FREE = ("set", "grid", "points", "search", "launch")  # may hold ${references}, which are the recipe's business


def read_plan(file: Path, runs: Path, name: str | None = None) -> Sweep:
    """The sweep that a file describes. Nothing is written; see keep()."""
    tree = load_file(file)
    wrong: list[str] = []
    given = {one: value for one, value in tree.items() if one not in _FREE and value is not None}
    try:
        schema = Schema({"sweep": SweepFile}, "`rung sweep --help`")
        described: SweepFile = schema.resolve([Layer(f"file {file.name}", given)]).view("sweep")
    except ConfigError as error:
        wrong += str(error).splitlines()
        described = SweepFile(recipe="?")
    # A name with nothing behind it is an empty one.
    free = {one: tree[one] if tree.get(one) is not None else [] if one == "points" else {} for one in _FREE}
    if isinstance(free["launch"], dict):  # YAML reads a plain `on` as true
        free["launch"] = {"on" if one is True else one: value for one, value in free["launch"].items()}
    wrong += _find_mistakes(free, tree)
    if not described.recipe:
        wrong.append("recipe is missing; name what to train, as in `recipe: piano`")
    if wrong:
        message = "\n".join([f"{file} cannot be swept:", *(f"  {line}" for line in wrong)])
        raise ConfigError(message, code="bad-sweep")
    called = name or described.name or file.stem
    try:
        check_name(called)
    except RunError as error:
        what = str(error).replace("an experiment", "a sweep")
        raise ConfigError(f"{what[:-1]}; give `name: ...` in {file}, or --name.", code="bad-name") from None
    experiment = described.experiment or called
    check_name(experiment)

    configs = [str((file.parent / one).resolve()) for one in described.config]
    shared = [f"preset={described.preset}"] if described.preset else []
    shared += [part for one in configs for part in ("-c", one)]
    shared += [override(one, value) for one, value in free["set"].items()]
    num_points = max(1, len(free["points"])) * math.prod(len(values) for values in free["grid"].values())
    if num_points > MOST_POINTS:
        message = f"that is {num_points} points, and a sweep has at most {MOST_POINTS}; make the grid smaller"
        raise ConfigError(message, code="too-many")
    # Every listed point with every combination of the grid, whose last key moves fastest. A search finds its own.
    grid = [dict(zip(free["grid"], values)) for values in itertools.product(*free["grid"].values())]
    combined = [{**listed, **values} for listed in free["points"] or [{}] for values in grid]
    points = [] if free["search"] else [make_point(described.recipe, shared, varies) for varies in combined]
    by_key: dict[str, list[int]] = {}
    for number, point in enumerate(points, start=1):
        by_key.setdefault(point.key, []).append(number)
    twins = [places for places in by_key.values() if len(places) > 1]
    if twins:
        lines = [f"  points {' and '.join(map(str, places))}: {points[places[0] - 1].label}" for places in twins]
        raise ConfigError("\n".join([f"{file} has duplicate points; keep one of each:", *lines]), code="bad-sweep")

    root = runs.absolute()
    return Sweep(
        name=called,
        folder=root / SWEEPS / called,
        runs=root,
        recipe=described.recipe,
        experiment=experiment,
        points=tuple(points),
        eval_split=described.eval or None,
        retries=described.retries,
        ranks=described.ranks,
        launch=free["launch"],
        metric=free["search"].get("metric"),
        search=free["search"] or None,
        why=described.why or None,
        words=tuple(shared),
    )


def keep(sweep: Sweep) -> Sweep:
    """Writes the plan into its folder, beside what was planned there before, and returns it as it is kept."""
    file = sweep.folder / "sweep.json"
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
        with locked(sweep.folder):
            before = refuse_another(sweep)
            copies: dict[str, str] = {}
            for config in split_files(sweep.words)[1]:
                data = Path(config).read_bytes()
                name = f"{hashlib.blake2b(data, digest_size=4).hexdigest()}-{Path(config).name}"
                copy = sweep.folder / CONFIGS / name
                if not copy.exists():
                    copy.parent.mkdir(exist_ok=True)
                    write_whole(copy, data)
                copies[config] = str(copy)
            _write(sweep, before, copies)
    except OSError as error:
        raise refused(str(file), error) from error
    return load(sweep.folder)


def refuse_another(sweep: Sweep) -> dict[str, Any] | None:
    """What was planned before under this name; refuses a sweep of another recipe."""
    if not (sweep.folder / "sweep.json").exists():
        return None
    before = _document(sweep.folder)
    if before.get("recipe") != sweep.recipe:
        raise UserError(
            f"there is a sweep {sweep.name} of {before.get('recipe')} under {sweep.runs}, and this one is of "
            f"{sweep.recipe}; call it something else with --name NAME.",
            code="sweep-exists",
        )
    return before


def add_points(sweep: Sweep, points: Iterable[Point]) -> Sweep:
    """Writes further points into the plan, as a search finds them; those that are there already stay as they are."""
    try:
        with locked(sweep.folder):
            known = load(sweep.folder)
            there = {one.key for one in known.points}
            new = {one.key: one for one in points if one.key not in there}
            grown = dataclasses.replace(known, points=(*known.points, *new.values()))
            _write(grown, _document(sweep.folder), {})
    except OSError as error:
        raise refused(str(sweep.folder / "sweep.json"), error) from error
    return load(sweep.folder)


def load(folder: Path, with_retired: bool = False) -> Sweep:
    """Reads sweep.json of a folder, which may have been moved, or be mounted elsewhere."""
    folder = folder.absolute()
    kept = _document(folder)
    try:
        points = [one for one in kept["points"] if with_retired or not one.get("retired")]
        for one in points:  # sweep.json may have come from elsewhere, and these become a command and names of files
            if not _KEY.fullmatch(one["key"]) or not _are_overrides(one["words"]):
                raise TypeError(f"the point {one['key']!r} is none that a plan makes")
        if not _are_overrides(kept["words"]):
            raise TypeError(f"the words {kept['words']!r} are none of a plan")
        return Sweep(
            folder=folder,
            runs=folder.parent.parent,
            points=tuple(
                Point(one["key"], _locate_files(one["words"], folder), one["varies"], one.get("run")) for one in points
            ),
            words=_locate_files(kept["words"], folder),
            **{name: kept[name] for name in _FIELDS},
        )
    except (KeyError, TypeError, AttributeError) as error:
        message = f"{folder / 'sweep.json'} is damaged: {error!r}; start the sweep again from its file."
        raise RunError(message, code="sweep-damaged") from None


def _are_overrides(words: Sequence[str]) -> bool:
    """Whether words are key=value, or options that a plan gives: a config file, the base and the tag of an A/B."""
    rest = iter(words)
    for word in rest:
        if word in ("-c", "--parent", "--from", "--tag"):  # --from: in plans before --parent had its name
            if next(rest, "-").startswith("-"):
                return False
        elif word.startswith("-") or "=" not in word:
            return False
    return True


def find_sweep(name: str, runs: Path) -> Sweep:
    """The kept sweep of this name."""
    folder = runs.absolute() / SWEEPS / name
    if name and "/" not in name and (folder / "sweep.json").is_file():
        return load(folder)
    known = [path.name for path in sweeps(runs)]
    raise RunError(f"there is no sweep {one_line(name)} under {runs}; {nearest(name, known)}", code="no-sweep")


def sweeps(runs: Path) -> list[Path]:
    """The folders of all sweeps under `runs`."""
    return sorted(path.parent for path in (runs.absolute() / SWEEPS).glob("*/sweep.json"))


def _find_mistakes(free: Mapping[str, Any], tree: Mapping[str, Any]) -> list[str]:
    """One sentence for each mistake in the parts that hold keys of the recipe."""
    wrong = []
    for name in ("set", "grid", "search", "launch"):
        if not isinstance(free[name], dict):
            return [f"{name} must hold keys and values, not {one_line(free[name])!r}"]
    if not isinstance(free["points"], list) or not all(isinstance(one, dict) and one for one in free["points"]):
        return ["points must be a list of keys and values, such as `- {lr.learning_rate: 1e-3, seed: 0}`"]
    for place in (free["set"], free["grid"], *free["points"]):
        names = [name for name in place if not isinstance(name, str)]  # a plain `on` or 1 is none to YAML
        wrong += [f"{one_line(name)} is not a key; put it in quotes if it is" for name in names]
    if wrong:
        return wrong
    for name, values in free["grid"].items():
        if not isinstance(values, list):
            wrong.append(f"grid: {name} must be a list of values, such as [{one_line(values)}]")
        elif not values:
            wrong.append(f"grid: {name} has no values, so the sweep has no points; give at least one")
    places = {"set": set(free["set"]), "grid": set(free["grid"]), "points": {k for one in free["points"] for k in one}}
    if tree.get("preset"):
        places["preset"] = {"preset"}
    for first, second in (("set", "grid"), ("set", "points"), ("grid", "points"), ("preset", "grid"),
                          ("preset", "points"), ("preset", "set")):  # fmt: skip
        both = sorted(places.get(first, set()) & places[second])
        wrong += [f"{name} is given in {first} and in {second}; keep one" for name in both]
    if not (free["grid"] or free["points"] or free["search"]):
        wrong.append("nothing varies: give a grid, a list of points or a search (one run is `rung train`)")
    if free["search"] and (free["grid"] or free["points"]):
        wrong.append("a search chooses its own points; leave out grid and points, or leave out search")
    return wrong + wrong_launch(free["launch"])


def wrong_launch(launch: Mapping[str, Any]) -> list[str]:
    """One sentence for each name that no launcher knows."""
    unknown = [name for name in launch if name not in LAUNCH]
    return [f"launch: {one_line(name)} is not an option; {nearest(str(name), LAUNCH)}" for name in unknown]


def _locate_files(words: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Words with the paths of config files as they are where the folder lies now."""
    return tuple(str(folder / one) if before == "-c" else one for before, one in zip(["", *words], words, strict=False))


def _write(sweep: Sweep, before: Mapping[str, Any] | None, copies: Mapping[str, str]) -> None:
    """Writes sweep.json; `copies` maps config files to the copies beside it."""

    def plain(words: Sequence[str]) -> list[str]:
        return [
            str(Path(copies.get(one, one)).relative_to(sweep.folder)) if last == "-c" else one
            for last, one in zip(["", *words], words, strict=False)
        ]

    points: list[dict[str, Any]] = [
        {"key": one.key, "words": plain(one.words), "varies": dict(one.varies), **({"run": one.run} if one.run else {})}
        for one in sweep.points
    ]
    kept = {one["key"] for one in points}
    is_search = sweep.search is not None
    for one in (before or {}).get("points", []):
        if one["key"] not in kept:
            points.append(one if is_search else {**one, "retired": True})
    document = {
        "schema": SCHEMA,
        **{name: getattr(sweep, name) for name in _FIELDS},
        "words": plain(sweep.words),
        "points": points,
    }
    write_json(sweep.folder / "sweep.json", document)


def _document(folder: Path) -> dict[str, Any]:
    file = folder / "sweep.json"
    try:
        document = read_json(file)
    except FileNotFoundError:
        raise RunError(f"{folder} is not a sweep: it has no sweep.json.", code="no-sweep") from None
    except OSError as error:
        message = f"cannot read {file}: {(error.strerror or str(error)).lower()}."
        raise RunError(message, code="cannot-read") from error
    except ValueError as error:
        message = f"{file} is damaged: {error}; remove it and start the sweep again from its file."
        raise RunError(message, code="sweep-damaged") from None
    if not isinstance(document, dict) or not isinstance(document.get("schema"), int) or "points" not in document:
        raise RunError(f"{file} is damaged: it names no schema or no points.", code="sweep-damaged")
    if problem := newer(file, document, SCHEMA):
        raise RunError(f"{problem}.", code="sweep-newer")
    if found := mismatch(document, _SHAPE, "it"):
        raise RunError(f"{file} is damaged: {found}; start the sweep again from its file.", code="sweep-damaged")
    if any(not isinstance(one.get("key"), str) for one in document["points"] or ()):
        raise RunError(f"{file} is damaged: a point has no key; start the sweep again.", code="sweep-damaged")
    return document

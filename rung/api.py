"""Trains, resumes, evaluates, loads and samples: what the verbs and a notebook call.

    run = rung.train("piano", ["optimizer.max_iters=200"], why="a first look")
    run = rung.resume(run)
    rung.evaluate(run)["full_val"]["loss"]
    model = rung.load(run)
    model.sample(temperature=0.9)

A run that diverges or is stopped is returned with that status. A mistake of the caller raises UserError with one
sentence. torch is imported by what is called, not by this module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.config import Layer
from rung.errors import RunError, UserError
from rung.recipe import Pretrained, Recipe, Sample, has_splits
from rung.recipes import CATALOG, short_name
from rung.resolve import PYTHON, Resolved, nested, recipe_of, resolve, resolve_resume, resolve_saved
from rung.runs.query import Run, open_run, ref, root_of
from rung.secrets import command_without_secrets
from rung.text import write

if TYPE_CHECKING:
    from torch import nn

    from rung.engine.build import Setup
    from rung.evaluation import Evaluation
    from rung.progress import MakeDisplay
    from rung.recipe import Report

RunRef = str | Path | Run  # "piano/7", "piano" (the latest), "piano/best", a folder, or a run


def train(
    recipe: str | type[Recipe] | Resolved | None = None,
    overrides: str | Sequence[str] = (),
    *,
    preset: str | None = None,
    files: Sequence[str | Path] = (),
    config: Mapping[str, Any] | None = None,
    experiment: str | None = None,
    parent: RunRef | None = None,
    why: str | None = None,
    tags: Sequence[str] = (),
    mirrors: Sequence[str] = (),
    remote: str | None = None,
    runs: str | Path | None = None,
    check: bool = True,
    sweep: Mapping[str, Any] | None = None,
    display: MakeDisplay | bool = True,
) -> Run:
    """Trains a recipe, records everything about it under runs/ and returns the run, however it ended.

    recipe: "piano", "package.module:Class", or a Recipe class; left out, that of `parent`.
    overrides: key=value words, as `rung train` takes them; `config` is the same as a dict, nested or with dotted keys.
    preset, files: a preset by name, YAML files of keys. Files win over the preset, `config` over files, words over all.
    parent: start from the config of this run; what is added is the change. why: what the run is to find out.
    experiment: the series to file it under; by default the parent's, else the recipe's name. tags: words to find it by.
    mirrors: "wandb", "tensorboard". remote: object storage to send the run to. runs: the folder, else $RUNG_RUNS.
    check: look for mistakes before step 0. sweep: the point of a sweep that this run is.
    display: True for plain lines on stderr, False for none, or what makes one (rung.progress.make_display).

    Ctrl-C saves at the next step boundary and returns the run as stopped. Under torchrun every rank calls it; ranks
    other than the first get a run that knows its folder, id and status.
    """
    from rung.data.store import commands_of
    from rung.engine.build import build
    from rung.engine.fingerprints import checksums
    from rung.engine.loop import StopRequest
    from rung.progress import patience
    from rung.runs.executed import Executed
    from rung.runs.maintenance.tags import check_tag
    from rung.runs.record import Record, check_name
    from rung.training import Followers, check_before, header, train_to_end

    root, tags = root_of(runs), [check_tag(tag) for tag in ([tags] if isinstance(tags, str) else tags)]
    if isinstance(recipe, Resolved):
        assert not any((overrides, preset, files, config, parent)), "all of this is in what was resolved"
        resolved = recipe
    else:
        resolved = resolve(
            recipe, overrides, files, preset=preset, config=config,
            parent=None if parent is None else _open(parent, root), runs=root, source=PYTHON,
        )  # fmt: skip
    if resolved.config.view("engine").eval_only:
        raise UserError(
            "eval_only=true trains nothing and makes no run; evaluate one with rung.evaluate(run)",
            code="options-conflict",
        )
    followers = Followers([mirrors] if isinstance(mirrors, str) else mirrors, remote)
    followers.configure(resolved)
    before = resolved.parent
    series = experiment or (str(before.document["experiment"]) if before else short_name(resolved.recipe))
    check_name(series)  # now, not when all is built
    slow = "opening data, building the model"  # where the first lines of a run are late
    if check:
        slow += ", running checks (--no-check skips them)"
    values = resolved.config.values
    if values["system.dtype"] in ("float16", "bfloat16") and values["system.device"] == "cpu":
        slow += f"; system.dtype={values['system.dtype']} is slow on most CPUs, float32 is not"
    with patience(slow) if display else contextlib.nullcontext():
        setup = build(resolved.config, resolved.recipe_class, root)
        with setup.world.telling():
            checked = check_before(setup, resolved.recipe) if check else []
    with StopRequest() as asked, setup.world.telling():
        record = None
        if setup.world.is_first:
            record = Record.create(
                root,
                series,
                recipe=resolved.recipe,
                preset=resolved.preset,
                command=command_without_secrets(sys.argv),
                seed=setup.cfg.seed,
                config=resolved.config.tree(),
                sources=resolved.config.sources,
                derived=setup.derived,
                data=setup.data,
                definitions=setup.definitions(),
                initial_weights=checksums(setup.state.model),
                parent=before.id if before else None,
                parent_uid=before.document.get("uid") if before else None,
                why=why,
                tags=tuple(tags),
                code_root=Path.cwd(),
                sweep=None if sweep is None else dict(sweep),
                prepared=list(commands_of(resolved.recipe, resolved.config.tree().get("dataset"))),
            )
            record.follow(Executed(record, command_without_secrets(sys.argv)))
            if checked:
                record.event("check", results=[result.to_dict() for result in checked])
            followers.follow(record)
        opening = [] if record is None else header(record.id, resolved, setup, why, checked)
        return train_to_end(setup, record, opening, followers, _display(display), asked)


def resume(
    run: RunRef,
    overrides: str | Sequence[str] = (),
    *,
    at: int | None = None,
    accept_edits: bool = False,
    mirrors: Sequence[str] = (),
    remote: str | None = None,
    runs: str | Path | None = None,
    display: MakeDisplay | bool = True,
) -> Run:
    """Continues a run from its last save, or the one `at` a step, as if it had never stopped.

    overrides: only what leaves alone what is learned: where it runs, how often it saves and evaluates, how the rows of
    a step are cut into micros. For anything else train a new run with `parent=`. The config is that of the save; a
    config.yaml that was edited since is refused, unless accept_edits says to train on with it. The rest is as in
    train().
    """
    from rung.engine import checkpoint
    from rung.engine.build import build, restore
    from rung.engine.loop import StopRequest
    from rung.runs.executed import Executed
    from rung.runs.record import Record
    from rung.training import Followers, train_to_end

    root, followers = root_of(runs), Followers([mirrors] if isinstance(mirrors, str) else mirrors, remote)
    found = _open(run, root)
    if found.status == "running":  # asked first: its saves come and go while we look
        raise RunError(
            f"{found.id} is still {found.status_text}; stop it first, or start a new run", code="wrong-state"
        )
    recipe_of(found, root)  # first: a script has no saves either, and another remedy
    name = ref(found.path, found.id)
    saves = checkpoint.Checkpoints(found.path / "checkpoints")
    steps = saves.steps()
    if not steps:
        raise RunError(
            f"{found.id} has no save to resume from; start again with `rung train --parent {name}`",
            code="no-checkpoint",
        )
    step = steps[-1] if at is None else at
    if step not in steps:
        raise RunError(
            f"{found.id} has no save at step {step}; it has {', '.join(map(str, steps))}", code="no-checkpoint"
        )
    saved = checkpoint.load(saves.at(step))
    resolved, since = resolve_resume(found, saved.state["config"], overrides, takes_edits=accept_edits, runs=root)
    followers.configure(resolved)
    if found.status == "finished" and step == steps[-1]:
        budget = resolved.config.values["optimizer.max_iters"]
        why = found.document.get("reason") or f"optimizer.max_iters={budget} was reached"
        raise RunError(
            f"{found.id} is finished: {why} at step {step}; another budget is "
            f"another run: `rung train --parent {name} init_from={name} optimizer.max_iters=...`",
            code="wrong-state",
        )
    setup = build(resolved.config, resolved.recipe_class, root, is_new=False)
    with setup.world.telling():
        restore(setup, saved, evaluated={row["step"] for row in found.evals()})
    with StopRequest() as asked, setup.world.telling():
        record = None
        opening = [f"{found.id} resumes at step {step}", *since.lines(found.id), *setup.chosen]
        if since.edits:
            edits = ", ".join(f"{name} {then} -> {now}" for name, (then, now) in since.edits.items())
            opening.insert(1, f"config.yaml was edited since, and is trained on with: {edits}")
        if setup.world.is_first:
            record = Record.reopen(found.path, command=command_without_secrets(sys.argv))
            record.follow(Executed(record, command_without_secrets(sys.argv)))
            try:
                saves.sweep()
                aside = saves.set_aside(after=step)
                saves.clean(setup.cfg.checkpoint.keep)  # a kill may have come between a save and the rotation
                given = [overrides] if isinstance(overrides, str) else list(overrides)
                accepted = {name: list(pair) for name, pair in since.edits.items()}
                record.event("resume", step=step, overrides=given, set_aside=aside, edits=accepted)
            except BaseException as error:  # nothing was trained: the run is what it was, and has not vanished
                was = str(found.document.get("status"))
                record.finish("stopped" if was == "running" else was, reason=f"resuming failed: {error}")
                raise
            if aside:
                opening.append(f"set aside the later saves {', '.join(map(str, aside))}, in {found.path}/checkpoints")
            followers.follow(record)
        return train_to_end(setup, record, opening, followers, _display(display), asked)


def evaluate(
    run: RunRef | Resolved,
    overrides: str | Sequence[str] = (),
    *,
    split: str | None = None,
    at: int | None = None,
    weights: str | Path | None = None,
    out: str | Path | None = None,
    runs: str | Path | None = None,
    report: Report | None = None,
) -> Evaluation:
    """Evaluates a run on all its eval sets, with the loss it was trained with: set -> exact averages.

    at: the save; by default the best one, else the last. split: another split of the data, such as "test"; looks
    closer (by component and position, with standard errors) and keeps what it finds in `out`, by default evals/ in the
    run's folder. weights: a Hugging Face folder to evaluate on the same rows, as a baseline; then `run` may be a
    recipe. report: called with progress, as report(what, done, total).
    """
    from rung.engine.build import build
    from rung.evaluation import Evaluation, evaluate_sets, examine_sets, file_of, refuse_other_rows, write

    root, folder = root_of(runs), None if weights is None else Path(weights)
    if folder is not None and at is not None:
        raise UserError(
            f"--at {at} names a save of the run, --weights {folder} another model; leave one of them out",
            code="options-conflict",
        )
    if folder is not None and not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}; --weights takes a Hugging Face folder (config.json, weights)",
            code="no-folder",
        )
    found: Run | None = None
    step: int | None = None
    if isinstance(run, Resolved):  # weights as init_from names them
        setup = build(run.config, run.recipe_class, root, is_training=False)
    elif folder is None:
        loaded = load(run, overrides, at=at, runs=root)
        found, step, setup = loaded.run, loaded.step, loaded.setup
    else:
        if not isinstance(run, Run) and (str(run) in CATALOG or ":" in str(run)):
            resolved = resolve(str(run), overrides, runs=root)
        else:  # without weights `piano` is its latest run
            found = _open(run, root)
            resolved = resolve(None, overrides, parent=found, runs=root)
        setup = build(resolved.config, resolved.recipe_class, root, is_training=False, is_new=False)
    label = f"checkpoint {step}" if folder is None else f"folder {folder.name}"
    if isinstance(run, Resolved):
        label = f"init_from {setup.cfg.init_from}"
    model = setup.state.model
    if folder is not None:
        if not isinstance(setup.recipe, Pretrained):
            raise UserError(f"{type(setup.recipe).__name__} cannot evaluate external weights", code="not-supported")
        model = setup.recipe.load_external(folder).to(setup.world.device)
    if split is not None and not has_splits(type(setup.recipe)):
        raise UserError(f"{type(setup.recipe).__name__} has no split {split!r} to evaluate on", code="no-split")
    streams = setup.evaluator.streams if split is None else setup.recipe.streams(split)
    if split is None and folder is None:
        return Evaluation(evaluate_sets(setup, model, streams), found, step, label)
    place = Path(out) if out is not None else Path("evals") if found is None else found.path / "evals"
    name = split or "validation"
    file = file_of(place, name, step, label)
    if overrides:
        refuse_other_rows(file, streams)
    sets, windows = examine_sets(setup, model, streams, report or (lambda what, done, total: None))
    result = Evaluation(sets, found, step, label, name, windows, file)
    write(result)
    return result


def load(
    run: RunRef,
    overrides: str | Sequence[str] = (),
    *,
    at: int | None = None,
    device: str | None = None,
    runs: str | Path | None = None,
) -> Loaded:
    """The trained model of a run, with the weights of one of its saves: the best one, else the last, or `at` a step.

    overrides: key=value words, such as system.dtype=float32. device: "cpu", "cuda"; by default as the run chose.
    """
    from rung.engine import checkpoint
    from rung.engine.build import build, find_checkpoint

    root = root_of(runs)
    found = _open(run, root)
    recipe_of(found, root)
    saves = checkpoint.Checkpoints(found.path / "checkpoints")
    if at is not None and at not in saves.steps():
        steps = ", ".join(map(str, saves.steps())) or "none"
        raise RunError(f"{found.id} has no save at step {at}; it has {steps}", code="no-checkpoint")
    path = find_checkpoint(str(found.path), root) if at is None else saves.at(at)
    saved = checkpoint.load(path)
    where = {"system.device": device} if device else None
    resolved, _ = resolve_saved(found, saved.state["config"], overrides, config=where, runs=root)
    setup = build(resolved.config, resolved.recipe_class, root, is_training=False, is_new=False)
    checkpoint.check_identity(saved, setup.identity)
    saved.load_into(setup.state.model)
    for name, was in found.data().items():
        if name in setup.streams and setup.streams[name].fingerprint != was["fingerprint"]:
            write(sys.stderr, f"note: {name} is other data than {found.id} was trained with\n")
    setup.state.model.eval()
    return Loaded(found, saved.step, resolved, setup)


def sample(
    run: RunRef,
    overrides: str | Sequence[str] = (),
    *,
    at: int | None = None,
    seed: int = 0,
    device: str | None = None,
    runs: str | Path | None = None,
    **sampling: Any,
) -> Samples:
    """Samples of a run: load(run).sample(...). To sample more than once, keep what load() gives."""
    return load(run, overrides, at=at, device=device, runs=runs).sample(seed=seed, **sampling)


@dataclass(frozen=True, repr=False)
class Loaded:
    """A trained model that can be sampled from. `setup` is all of it, as the engine knows it."""

    run: Run
    step: int  # of the save that the weights are from
    resolved: Resolved
    setup: Setup

    @property
    def model(self) -> nn.Module:
        return self.setup.state.model

    @property
    def recipe(self) -> Recipe:
        return self.setup.recipe

    @property
    def config(self) -> dict[str, Any]:
        """Every key with the value that is used, as a tree."""
        return self.resolved.config.tree()

    def sample(self, *, seed: int = 0, **sampling: Any) -> Samples:
        """What the recipe makes of the weights, the same for the same seed and keys, and for `rung sample`.

        `sampling` are the keys of that group which the recipe has, for this call: prompt, temperature, num_samples,
        ... (`rung config RECIPE` lists them).
        """
        import numpy as np

        from rung.random import Draw

        setup = self.setup
        if sampling:
            for name, value in sampling.items():
                if isinstance(value, str) and "${" in value:
                    raise UserError(
                        f"{name}={value!r} has ${{ in it, which is the syntax of a reference; use other text",
                        code="bad-value",
                    )
            tree = self.config
            tree["sampling"] = {**tree.get("sampling", {}), **nested(sampling)}
            config = self.resolved.config.schema.resolve([Layer(PYTHON, tree)])
            recipe = self.resolved.recipe_class(config.view("recipe"), setup.cfg.seed)
            recipe.streams()  # where a recipe looks at its keys, as in build()
            setup = dataclasses.replace(setup, recipe=recipe)
        made = Samples(setup.samples(Draw(seed, self.step, np.arange(1))))
        if not made:
            raise UserError(f"the recipe of {self.run.id} makes no samples", code="not-supported")
        return made

    def __repr__(self) -> str:
        kind, size = type(self.model).__name__, self.setup.derived["parameters"]
        return f"<Loaded {self.run.id} at step {self.step}: {kind}, {size:,} parameters, {self.setup.world.device}>"

    def _repr_html_(self) -> str:
        from html import escape

        return f"<code>{escape(repr(self))}</code>"


class Samples(list[Sample]):
    """Samples, which a notebook shows: text, pictures, sound."""

    def write(self, folder: str | Path) -> list[Path]:
        """Writes each to its file below `folder`."""
        from rung.files import write_whole

        paths = [Path(folder) / one.name for one in self]
        for path, one in zip(paths, self, strict=True):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, one.data)
            except OSError as error:
                raise UserError(
                    f"cannot write {path}: {error.strerror}; choose another place with --out", code="cannot-write"
                ) from error
        return paths

    def _repr_html_(self) -> str:
        return "\n".join(one._repr_html_() for one in self)


def rebuild(
    run: Run, dtype: str, *, save: Path | None = None, on_cpu: bool = False, runs: str | Path | None = None
) -> Setup:
    """The run's own config, as in a save or capture of it, in the precision it was computed in, on this machine; for
    `rung replay`."""
    import torch

    from rung.engine.build import build, take_threads_of
    from rung.engine.init_from import config_of

    overrides = [f"system.dtype={dtype}"]
    wants_gpu = str(run.config()["system"]["device"]).startswith("cuda")
    if on_cpu or (wants_gpu and not torch.cuda.is_available()):
        overrides.append("system.device=cpu")
    if save is None:
        resolved = resolve(None, overrides, parent=run, runs=runs)
    else:
        resolved, _ = resolve_saved(run, config_of(save), overrides, runs=runs)
    is_training = resolved.config.values["system.compile"]
    setup = build(resolved.config, resolved.recipe_class, root_of(runs), is_training=is_training, is_new=False)
    if save is None and setup.world.device.type == "cpu":  # a save brings its own
        then = run.document.get("derived") or {}
        take_threads_of(setup, then.get("threads"), then.get("num_ranks"))
    return setup


def _open(run: RunRef, root: Path) -> Run:
    """The run as it stands on disk now; a Run that was opened earlier may be out of date."""
    return open_run(run.path if isinstance(run, Run) else run, root)


def _display(display: MakeDisplay | bool) -> MakeDisplay:
    from rung.progress import PlainDisplay, Silent

    if display is True:
        return functools.partial(PlainDisplay, out=sys.stderr)
    return display or Silent

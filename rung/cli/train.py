"""rung train"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.cli.progress import patience
from rung.cli.resolve import Resolved, recipe_of, resolve, run_layer, runs_option
from rung.config import differences
from rung.errors import UserError
from rung.recipes import short_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rung.doctor.preflight.result import Result
    from rung.engine.build import Setup
    from rung.neighbours.mirror import Mirror
    from rung.remote.upload import Uploader
    from rung.runs.record import Record

mirror_option = click.option(
    "--mirror",
    "mirrors",
    multiple=True,
    type=click.Choice(["wandb", "tensorboard"]),
    help="Also write it for this tracker, offline; may be repeated.",
)
remote_option = click.option(
    "--remote", metavar="URL", help="Also send the run to object storage, after each save and at the end."
)


@dataclass(frozen=True)
class Entry:
    """How a run is entered in the book: where, after which run, and what for."""

    experiment: str
    parent: str | None = None
    why: str | None = None
    tags: tuple[str, ...] = ()
    mirrors: tuple[str, ...] = ()
    before: dict[str, Any] | None = None  # the parent's config
    remote: str | None = None  # where it is sent while it trains
    sweep: dict[str, Any] | None = None  # its name, the run's point in it, and what the points differ in


@click.command(short_help="Train a recipe.")
@click.argument("recipe", required=False)
@click.argument("words", nargs=-1, metavar="[preset=NAME] [KEY=VALUE]...")
@click.option("-c", "--config", "files", multiple=True, type=click.Path(path_type=Path), help="A YAML file of keys.")
@click.option("--from", "parent", help="Start from the config of this run; what you add is the change.")
@click.option("--why", help="What this run is to find out; kept with it.")
@click.option("--experiment", help="The series to file the run under; default: the parent's, else the recipe's name.")
@click.option("--tag", "tags", multiple=True, help="A word to find the run by; may be repeated.")
@click.option(
    "--check/--no-check", "checks", default=True, help="Look for mistakes before step 0, as `rung check` does."
)
@click.option("--sweep", "point", hidden=True, help="NAME:KEY, the point of a sweep that this run is.")
@mirror_option
@remote_option
@runs_option
def command(
    recipe: str | None,
    words: tuple[str, ...],
    files: tuple[Path, ...],
    parent: str | None,
    why: str | None,
    experiment: str | None,
    tags: tuple[str, ...],
    checks: bool,
    point: str | None,
    mirrors: tuple[str, ...],
    remote: str | None,
    runs_root: Path,
) -> None:
    """Train RECIPE and record everything about it under runs/.

    Ctrl-C saves at the next step boundary and stops; `rung resume` goes on from there. A second Ctrl-C stops at once.

    \b
    Examples:
      rung train piano
      rung train piano preset=small optimizer.max_iters=2000 --why "does it fit in an evening?"
      rung train --from piano/6 optimizer.grad_clip=0.5 --why "norm sits at 1.0 from step 300"
      rung train piano init_from=piano/6 lr.learning_rate=1e-4
      rung train piano eval_only=true init_from=piano/6
      rung train piano --mirror tensorboard
      rung train piano --remote s3://bucket/lab
      torchrun --nproc-per-node 2 -m rung train piano
    """
    from rung.runs.house.tags import check_tag
    from rung.runs.query import open_run

    tags = tuple(check_tag(tag) for tag in tags)
    base, before = None, None
    if parent is not None:
        run = open_run(parent, runs_root)
        if recipe is not None and "=" in recipe:
            words, recipe = (recipe, *words), None
        recipe = recipe or recipe_of(run)
        base, before = [run_layer(run.id, run.config(), run.sources())], run.config()
        parent, experiment = run.id, experiment or run.document["experiment"]
    if recipe is None:
        raise UserError("which recipe? (`rung recipes` lists them), or --from RUN")
    resolved = resolve(recipe, words, files, base)
    sweep = None if point is None else of_sweep(point, runs_root)
    entry = Entry(experiment or short_name(recipe), parent, why, tags, mirrors, before, remote, sweep)
    train(recipe, resolved, runs_root, entry, checks)


def train(recipe: str, resolved: Resolved, runs_root: Path, entry: Entry, checks: bool = True) -> None:
    from rung.engine.build import build
    from rung.engine.initial import checksums
    from rung.runs.record import Record

    kinds = mirrors_of(resolved, entry.mirrors)
    is_training = not resolved.config.values["eval_only"]
    if is_training:
        require_mirrors(kinds)
        require_remote(entry.remote)
    with patience(_getting_ready(resolved, checks)):
        setup = build(resolved.config, resolved.recipe_class, runs_root, is_training)
        looked = check_before(setup, recipe) if checks and is_training else []
    if setup.cfg.eval_only:
        from rung.cli.eval import baselines_of, print_results

        print_results(setup.evaluator.run(setup.state.model), baselines_of(setup.streams), as_json=True)
        return
    record = None
    if setup.world.is_first:
        record = Record.create(
            runs_root,
            entry.experiment,
            recipe=recipe,
            preset=resolved.preset,
            command=sys.argv,
            seed=setup.cfg.seed,
            config=resolved.config.tree(),
            sources=resolved.config.sources,
            derived=setup.derived,
            data=setup.data,
            definitions=setup.definitions(),
            initial_weights=checksums(setup.state.model),
            parent=entry.parent,
            why=entry.why,
            tags=entry.tags,
            code_root=Path.cwd(),
            sweep=entry.sweep,
        )
    if record is None:
        follow(setup, None, "")
        return
    if looked:
        record.event("check", results=[result._asdict() for result in looked])
    words = header(record.id, resolved, setup, entry)
    mirrors, upload = open_mirrors(record, kinds), open_remote(record, entry.remote)
    others = [one.words() for one in (*mirrors, upload) if one is not None]
    follow(setup, record, "\n  ".join([words, *_told(looked), *others]), mirrors, upload)


def _getting_ready(resolved: Resolved, checks: bool) -> str:
    """What to say when the first words of a run are late."""
    dtype = resolved.config.values["system.dtype"]
    words = "getting ready: data is opened, the model built"
    if checks:
        words += ", mistakes looked for (--no-check leaves that out)"
    if dtype in ("float16", "bfloat16") and resolved.config.values["system.device"] == "cpu":
        words += f"; system.dtype={dtype} is slow on most CPUs, float32 is not"
    return words


def of_sweep(point: str, runs_root: Path) -> dict[str, Any]:
    """What run.json says of the point of a sweep: `point` is NAME:KEY."""
    name, _, key = point.rpartition(":")
    file = runs_root / ".sweeps" / name / "sweep.json"
    try:
        points = {one["key"]: one for one in json.loads(file.read_text("utf-8"))["points"]}
        return {"name": name, "point": key, "varies": points[key]["varies"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{file} knows no point {key} of a sweep {name}; start it with `rung sweep`") from None


def mirrors_of(resolved: Resolved, asked: Sequence[str]) -> tuple[str, ...]:
    """The trackers that the command line or the config asks for."""
    resolved.config.reads.add("logging.wandb_project")  # the mirror reads it, out of the tree
    return (*asked, "wandb") if resolved.config.view("engine").logging.wandb_log else tuple(asked)


def require_mirrors(kinds: Sequence[str]) -> None:
    """Asked before a run begins: a package that is missing must not cost one."""
    if kinds:
        from rung.neighbours.mirror import require

        for kind in kinds:
            require(kind)


def open_mirrors(record: Record, kinds: Sequence[str]) -> list[Mirror]:
    """Other trackers that are told of each row from now on."""
    if not kinds:
        return []
    from rung.neighbours.mirror import open_mirror
    from rung.runs.query import Run
    from rung.runs.record import read_document

    run = Run(record.path, read_document(record.path))
    mirrors = [open_mirror(kind, record.path, run.document, run.config()) for kind in dict.fromkeys(kinds)]
    for mirror in mirrors:
        record.follow(mirror)
    return mirrors


def require_remote(url: str | None) -> None:
    """Asked before a run begins: a bucket that is not there must not be found out after it."""
    if url is not None:
        from rung.remote.upload import require

        require(url)


def open_remote(record: Record, url: str | None) -> Uploader | None:
    """Who sends the run away from now on, after each save."""
    if url is None:
        return None
    from rung.remote.upload import Uploader

    upload = Uploader(record.path, url)
    upload.ask()
    record.follow(upload)
    return upload


def _await(upload: Uploader) -> None:
    """Waits for the last push, with progress; Ctrl-C leaves it, and the closing words say what completes it."""
    from rung.cli.progress import reporter

    report, close = reporter()
    try:
        upload.close(report=report)
    except KeyboardInterrupt:
        upload.close(timeout=0)
    finally:
        close()


def check_before(setup: Setup, recipe: str) -> list[Result]:
    """The quick form of `rung check`; refuses to start a run that cannot become anything."""
    if setup.world.size > 1:  # ranks would have to take part in what looks at gradients
        return []
    from rung.doctor.preflight.checks import quick

    results = quick(setup, recipe)
    failed = [result for result in results if result.level == "fail"]
    if failed:
        lines = "\n".join(f"  {one.name}: {one.seen}; {one.remedy}" for one in failed)
        raise UserError(
            f"{len(failed)} of {len(results)} checks before step 0 failed; nothing was started:\n{lines}\n"
            f"`rung check {recipe}` shows them all; --no-check trains all the same"
        )
    return results


def _told(results: Sequence[Result]) -> list[str]:
    """One line on the checks, and one for each that has something to say."""
    warned = [result for result in results if result.level == "warn"]
    num_passed = sum(result.level == "pass" for result in results)
    line = f"{num_passed} checks passed" + (f", {len(warned)} with a warning" if warned else "")
    return [line, *(f"warning: {one.name}: {one.seen}; {one.remedy}" for one in warned)] if results else []


def header(run_id: str, resolved: Resolved, setup: Setup, entry: Entry) -> str:
    """Everything that was chosen for the user, with the reason."""
    from rung.units import count

    preset = f"  {resolved.preset}" if resolved.preset else ""
    lines = [f"{run_id}{preset}  {count(setup.derived['parameters'])} parameters"]
    if entry.before is not None:
        changed = differences(entry.before, resolved.config.tree())
        what = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in changed.items()) or "nothing in the config"
        lines.append(f"from {entry.parent}: {what}")
    if entry.why:
        lines.append(f'why: "{" ".join(entry.why.split())}"')
    return "\n  ".join(lines + setup.chosen)


def follow(
    setup: Setup,
    record: Record | None,
    first_words: str,
    mirrors: Sequence[Mirror] = (),
    upload: Uploader | None = None,
) -> None:
    """Trains with a display and ends the record with what became of it."""
    from rung.cli.progress import PlainDisplay, Silent, make_display
    from rung.doctor.live import watch_of
    from rung.engine.loop import Outcome, fit

    outcome = Outcome("crashed", "an error of rung or of the recipe")
    show: PlainDisplay | Silent = Silent()
    try:
        if record is not None:
            baselines = {name: described["baselines"] for name, described in setup.data.items()}
            show = make_display(setup.num_steps, setup.cfg.logging.log_interval, baselines)
            show.say(first_words)
        outcome = fit(setup, record, show, None if record is None else watch_of(record.path))
    except UserError as error:  # a full disk, say: the run can go on once it is mended
        outcome = Outcome("stopped", str(error))
        raise
    except BaseException as error:
        outcome = Outcome("crashed", f"{type(error).__name__}: {error}")
        if _is_interrupt(error):
            outcome = Outcome("stopped", "interrupted twice", signal.SIGINT)
        elif _is_out_of_memory(error):
            raise UserError(
                f"out of memory at step {setup.state.progress.step}: {str(error).splitlines()[0][:160]}; lower "
                f"data.batch_size={setup.cfg.data.batch_size} (and raise optimizer.gradient_accumulation_steps), or "
                "take a smaller model or context"
            ) from error
        else:
            raise
    finally:
        show.close()
        is_failing = sys.exc_info()[0] is not None
        setup.world.leave()
        if record is not None:
            totals = setup.state.numbers()
            try:
                record.finish(outcome.status, reason=outcome.reason, last_step=totals["step"], totals=totals)
            except UserError:  # the disk is full, say: that must not hide why the run ended
                if not is_failing:
                    raise
            if upload is not None:
                _await(upload)
    if record is not None:
        others = [one.words() for one in (*mirrors, upload) if one is not None]
        show.say("\n".join([closing(setup, record, outcome), *others]))
    if not setup.world.is_first:  # or whoever started the ranks would end the first one, which has more to write
        return
    if outcome.status == "diverged":
        sys.exit(1)
    if outcome.signal:  # as the shell does: what comes after `&&` must not take this for the end of training
        sys.exit(128 + outcome.signal)


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is at the root of it; torch's file writer raises something of its own on top."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def closing(setup: Setup, record: Record, outcome: Any) -> str:
    """The run's id, its best eval loss, and the paths to look at."""
    from rung.engine.checkpoint import Checkpoints
    from rung.runs.query import ref
    from rung.units import count, duration

    progress = setup.state.progress
    lines = [
        f"{record.id} {outcome.status}{': ' + outcome.reason if outcome.reason else ''}  "
        f"{progress.step} steps, {count(progress.targets)} targets, {duration(progress.elapsed_s)}"
    ]
    if progress.best_loss is not None:
        name = next(iter(setup.evaluator.streams))
        base = "".join(f", {what} {value:.4f}" for what, value in setup.streams[name].baselines.items())
        lines.append(f"best {name} loss {progress.best_loss:.4f} at step {progress.best_step}{base}")
    path, name = _near(record.path), ref(record.path, record.id)
    samples = sorted((path / "samples").glob("*/*"))
    if samples:
        lines += [f"look at {sample}" for sample in samples if sample.parent == samples[-1].parent]
    lines.append(f"look at {path}, or `rung show {name}`")
    saves = Checkpoints(record.path / "checkpoints").steps()
    if outcome.status == "stopped":
        again = f"go on with `rung resume {name}` (saved at step {saves[-1]})" if saves else "nothing was saved"
        lines.append(again)
    if outcome.status == "diverged":
        lines += _diverged(record, name, saves)
    return "\n".join(lines)


def _diverged(record: Record, name: str, saves: list[int]) -> list[str]:
    """The first diagnosis, and what to type to know more."""
    from rung.runs.query import Run
    from rung.runs.record import read_document

    kept = f"the last save is of step {saves[-1]}" if saves else "nothing was saved before it"
    events = list(Run(record.path, read_document(record.path)).events("diverged"))
    if not events:
        return [kept]
    last = events[-1]
    state = f"Weights and optimizer are those before step {last['step']}"
    if last.get("is_broken"):
        state = "The weights are as they were found"
    place = f", kept with the batch in {_near(record.path / last['capture'])}" if last.get("capture") else ""
    return [
        f"first look: {last.get('diagnosis')}. {state}{place}; {kept}",
        f"find out why with `rung replay {name}`; what led to it with `rung doctor {name}`",
    ]


def _near(path: Path) -> Path:
    """The path as a person in this folder would type it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

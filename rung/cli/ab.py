"""`rung ab`: tries one change with paired seeds, or judges runs that exist."""

from __future__ import annotations

import functools
import math
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.cli.options import print_json, runs_option, trust_option
from rung.cli.show import is_number
from rung.cli.sweep_table import Display, print_plan
from rung.cli.trial import Arm, Cell, Trial, changed_keys, refuse_other_horizon
from rung.errors import RunError, UserError
from rung.report.table import one_line, paragraph, print_table, printable
from rung.runs.query import Run, open_run, ref
from rung.runs.record import append_event
from rung.sweep import state
from rung.sweep.plan import keep, wrong_launch
from rung.sweep.point import log_of
from rung.text import echo
from rung.units import duration

if TYPE_CHECKING:
    from rung.compare.judge import Judgement
    from rung.sweep.launch import Launcher
    from rung.sweep.space import Sweep

_RANGE = re.compile(r"(.+)/(\d+)\.\.(\d+)")
_NUM_TAIL_LINES = 30  # of what a training printed that failed
_BETWEEN = "\0"  # stands for the -- between the arms, which click would swallow


class Ab(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--judge" in args:
            args = [_BETWEEN if word == "--" else word for word in args]
        return super().parse_args(ctx, args)


@click.command("ab", cls=Ab, short_help="Try one change, or judge runs that exist.")
@click.argument("args", nargs=-1, metavar="BASE KEY=VALUE... | --judge A... -- B... [-- C...]")
@click.option("--seeds", "num_seeds", type=click.IntRange(1, 1000), default=3, show_default=True,
              help="Pairs to train: the seed of BASE, then the next ones.")  # fmt: skip
@click.option("--why", help="What the change is to show; kept with each run.")
@click.option("--experiment", help="The series to file the runs under; default: that of BASE.")
@click.option("--metric", "metrics", multiple=True,
              help="What to judge by, such as full_val/loss; default: that of the best eval of BASE. Several share the "
                   "error rate.")  # fmt: skip
@click.option(
    "--delta", type=click.FloatRange(min=0), help="The smallest difference that matters; default 0.5 % of the loss."
)
@click.option("--allow", "allowed", multiple=True, metavar="NAME",
              help="Accept this difference: sick, environment, packages, budget, a key, ...")  # fmt: skip
@click.option("--better", type=click.Choice(["lower", "higher"]), help="Which side is better, where no run records it.")
@click.option("--declare", "declared", metavar="NAME", help="What was changed on purpose, if not a config key: code.")
@click.option(
    "--aa", "is_aa", is_flag=True, help="No change: train seeds of BASE alone and show how far they lie apart."
)
@click.option(
    "--judge", "is_judging", is_flag=True, help="Train nothing; judge the runs before -- against those after it."
)
@click.option("--slots", type=click.IntRange(1, 1000), help="Trainings at a time on this machine; default 1.")
@click.option("--on", metavar="WHERE", help="local, ray, ray://HOST:PORT or slurm; default: local.")
@click.option("--launch", "launch_words", multiple=True, metavar="KEY=VALUE",
              help="As `launch` in a sweep file: threads=4, gpus=[0,1], partition=long, ...")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show which runs it would take, and stop.")
@click.option("--check", is_flag=True, help="Exit with 1 unless the verdict is BETTER or EQUIVALENT.")
@click.option("--verbose", is_flag=True, help="Show all that a training printed when it ends.")
@trust_option
@runs_option
@click.option("--json", "as_json", is_flag=True, help="Print the judgement as JSON; trainings go to the error output.")
def command(
    args: tuple[str, ...], num_seeds: int, why: str | None, experiment: str | None, metrics: tuple[str, ...],
    delta: float | None, allowed: tuple[str, ...], better: str | None, declared: str | None, is_aa: bool,
    is_judging: bool, slots: int | None, on: str | None, launch_words: tuple[str, ...], dry_run: bool, check: bool,
    verbose: bool, root: Path, as_json: bool,
) -> None:  # fmt: skip
    """Train BASE and BASE with one change, seed by seed, and say whether the change made it better.

    Runs that are there and equal what would be trained count, BASE too. After Ctrl-C the same command continues. The
    verdict is BETTER, WORSE, EQUIVALENT (less than delta), UNDECIDED (with how many more pairs it would take),
    CONFOUNDED (more than one thing differs) or INCOMPARABLE (the metric means two things).

    The trainings are the points of a sweep, ab-ID: `rung sweep show`, `log` and `stop` know it too.

    \b
    Examples:
      rung ab piano/6 optimizer.grad_clip=0.5 --why "norm sits at 1.0 from step 300"
      rung ab piano/6 optimizer.grad_clip=0.5 --seeds 5 --dry-run
      rung ab piano/6 optimizer.grad_clip=0.5 --slots 2
      rung ab piano/6 optimizer.grad_clip=0.5 --on slurm --launch partition=long
      rung ab piano/6 --aa
      rung ab --judge piano/6 -- piano/7
      rung ab --judge piano/3..5 -- piano/6..8 --metric full_val/loss --check
      rung ab --judge piano/3..5 -- piano/6..8 -- piano/9..11
    """
    from rung.compare.decide import LOOKS
    from rung.compare.judge import elapsed_s, judge
    from rung.compare.looks import judge_and_count
    from rung.compare.noise import floor_for
    from rung.compare.reading import main_metric
    from rung.config import parse_overrides

    if delta is not None and not math.isfinite(delta):
        message = f"--delta {delta} is not a finite number; give the smallest difference that matters, as 0.01"
        raise UserError(message, code="bad-value")
    judged = functools.partial(judge, delta=delta, allowed=allowed, declared=declared, better=better)
    if is_judging:
        _exit_unless_good(_judge_existing(args, root, judged, metrics, as_json), check)
        return
    launch = {"slots": slots or 1, **parse_overrides(launch_words)}
    if wrong := wrong_launch(launch):
        raise UserError(wrong[0], code="no-key")
    base, arms = _arms(args, root, is_aa, allowed, declared, len(metrics))
    seed = base.document.get("seed")
    if not isinstance(seed, int):
        message = f"{base.id} names no seed, so nothing can be paired with it; start it with `rung train`."
        raise RunError(message, code="not-supported")
    name = "A/A" if is_aa else f"A/B {' '.join(arms[-1].overrides) or declared}"
    seeds = [seed + i for i in range(max(num_seeds, 3) if is_aa else num_seeds)]
    experiment = experiment or str(base.document.get("experiment"))
    trial = Trial(base, root, arms, seeds, experiment, why or f"{name} of {base.id}", declared, launch)
    cells = trial.find(is_here=(on or launch.get("on")) in (None, "local"))
    sweep = trial.sweep(cells)
    launcher = _launcher(sweep, on)

    # The plan: which runs serve, which are to be trained, and about how long that takes.
    change = " ".join(arms[-1].overrides) or declared or "itself"
    echo(f"{base.id} against {change}, {len(seeds)} seeds", err=as_json)
    if dry_run or not as_json:
        print_plan(sweep, state.states(sweep), as_json)
    absent = [str(cell.seed) for cell in cells if cell.run is None and not trial.can_train(cell.arm)]
    if absent:
        echo(f"no control with seed {', '.join(absent)}: it needs the code of {base.id}", err=as_json)
    missing = sum(not cell.has_ended and trial.can_train(cell.arm) for cell in cells)
    seconds = elapsed_s(base)
    cost = f", about {duration(missing * seconds)} going by {base.id}" if missing and seconds else ""
    echo(f"{missing} run{'s' if missing != 1 else ''} to train{cost}", err=as_json)
    busy = [p.run.id for p in cells if p.run and p.run.status in ("running", "silent") and sweep.point(p.key).run]
    if busy:
        message = f"{', '.join(busy)} is still running; wait for it, or stop it, and give the same command again."
        raise RunError(message, code="wrong-state")
    if dry_run:
        return

    cells = _train(trial, cells, sweep, launcher, as_json, verbose)
    runs = {arm.name: [p.run for p in cells if p.arm is arm and p.run] for arm in arms}
    control = runs["control"]
    if is_aa:
        if not control:
            raise RunError("none of its runs has ended, so the noise is not known.", code="no-finished-run")
        metric = metrics[0] if metrics else main_metric(control[0])
        floor = floor_for(control[0], metric)
        if as_json:
            print_json({"ab": trial.id, "metric": metric, "floor": vars(floor) if floor else None})
        elif floor is None:
            echo(one_line(f"no noise floor: fewer than three seeds of {base.id} ended with a finite {metric}"))
        else:
            echo(one_line(f"noise floor of {metric}: {floor.words}"))
        return

    # What was first looked at was planned; the rest came later.
    before = [e for e in base.events("judgement") if e.get("ab") == trial.id and is_number(e.get("num_pairs"))]
    counted = [int(e["num_pairs"]) for e in before if e["num_pairs"] >= LOOKS[0]]
    planned = counted[0] if counted else len(seeds)
    judgements = judge_and_count(control, runs["variant"], judged, metrics, planned, 1)
    a, b = [run.id for run in control], [run.id for run in runs["variant"]]
    for judgement in judgements:
        more = judgement.more_pairs if judgement.word == "UNDECIDED" and not judgement.is_aa else None
        if more is not None and declared != "code":
            again = shlex.join([ref(base.path, base.id), *arms[-1].overrides])
            judgement.what_next = f"`rung ab {again} --seeds {len(seeds) + more}` trains them"
        left_out = ("pairs", "floor", "a", "b")
        figures = {name: value for name, value in judgement.to_dict().items() if name not in left_out}
        append_event(base.path, "judgement", ab=trial.id, overrides=list(arms[-1].overrides), a=a, b=b, **figures)
    _print_judgements(judgements, [b] * len(judgements), {"ab": trial.id, "a_runs": a}, control[0], as_json)
    _exit_unless_good(judgements, check)


def _exit_unless_good(judgements: Sequence[Judgement], check: bool) -> None:
    if check and any(judgement.word not in ("BETTER", "EQUIVALENT") for judgement in judgements):
        sys.exit(1)


def _launcher(sweep: Sweep, on: str | None) -> Launcher:
    from rung.sweep.launch import launcher_of
    from rung.sweep.launch.local import LocalLauncher

    made = launcher_of(sweep, on)
    if isinstance(made, LocalLauncher) and "threads" not in sweep.launch:
        # As many threads as the base had: their number moves the last digits of a loss, and slots must not.
        for slot in made.slots:
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
                slot.env.pop(name, None)
    return made


def _arms(
    args: Sequence[str], root: Path, is_aa: bool, allowed: Sequence[str], declared: str | None, num_metrics: int
) -> tuple[Run, list[Arm]]:
    """The base run and its arms, resolved: a mistake in a key ends here, before anything is trained."""
    from rung.compare.reading import is_of_engine
    from rung.resolve import resolve

    if not args or "=" in args[0]:
        raise UserError("which run is the base? as in `rung ab piano/6 optimizer.grad_clip=0.5`", code="missing-run")
    base, changes = open_run(args[0], root), tuple(args[1:])
    odd = [word for word in changes if word.startswith(("seed=", "preset=")) or "=" not in word]
    if odd:
        raise UserError(
            f"{odd[0]!r} is not a change to try: give key=value; seeds are chosen with --seeds N", code="bad-value"
        )
    if is_aa and changes:
        raise UserError(
            f"--aa trains the base alone; leave out {' '.join(changes)}, or leave out --aa", code="options-conflict"
        )
    if is_aa and num_metrics > 1:
        raise UserError("--aa measures the noise of one --metric; give one", code="options-conflict")
    if not is_aa and not changes and declared != "code":
        raise UserError(
            "what is the change? give key=value, or --declare code for an edit, or --aa for none", code="missing-change"
        )
    if not is_of_engine(base):
        raise UserError(
            f"{base.id} was trained by a loop of its own, which rung cannot start; train both arms with it, three "
            "seeds each, and judge them with `rung ab --judge A... -- B...`",
            code="not-supported",
        )
    control = Arm("control", (), resolve(None, (), parent=base, runs=root))
    if is_aa:
        return base, [control]
    variant = Arm("variant", changes, resolve(None, changes, parent=base, runs=root))
    keys = [key for key in changed_keys(control.resolved, variant.resolved) if key not in allowed]
    if changes and not keys:
        raise UserError(
            f"{' '.join(changes)} changes nothing that is learned: {base.id} already has it", code="no-change"
        )
    if len(keys) + (declared == "code") > 1:
        changed = [*keys, *(["code"] if declared == "code" else [])]
        raise UserError(
            f"that is {len(changed)} changes ({', '.join(changed)}), and a verdict is about one; try them one by "
            "one, or accept the others with --allow KEY",
            code="too-many-changes",
        )
    if not {"budget", "num_steps", "targets"} & set(allowed):
        refuse_other_horizon(base, control.resolved, variant.resolved)
    return base, [control, variant]


def _train(
    trial: Trial, cells: Sequence[Cell], sweep: Sweep, launcher: Launcher, as_json: bool, is_verbose: bool
) -> list[Cell]:
    """Trains what has not ended, as a sweep, and returns every cell whose run has ended.

    The first training that fails stops the others, which save: an A/B with a hole in it is worth little.
    """
    from rung.compare.judge import elapsed_s

    sweep = keep(sweep)
    trial.mark(sweep)  # what a killed call had no time for
    state.allow_again(sweep)
    left = [cell for cell in cells if not cell.has_ended and trial.can_train(cell.arm)]
    for cell in left:
        claim = state.last_claim(sweep, cell.key)
        if claim is not None and claim.outcome == "failed":
            state.try_again(sweep, cell.key)
    display = Display(sweep, state.states(sweep), is_quiet=as_json, is_live=not is_verbose)
    failed: dict[str, str] = {}

    def report(key: str, word: str, where: str) -> None:
        run = state.run_of(sweep, key) if word in ("finished", "failed") else None
        if word == "failed" and (run is None or run.status != "diverged"):
            failed[key] = where
            state.ask_to_stop(sweep)
        if run is not None and word == "finished":
            best, seconds = (run.best or {}).get("loss"), elapsed_s(run)
            loss = f", best loss {best:.4f}" if is_number(best) else ""
            where = f"{run.id}{loss}{f', {duration(seconds)}' if seconds else ''}"
        display.report(key, word, where)
        if is_verbose and word not in ("running", "waiting"):
            echo(_printed(log_of(sweep, key)), err=as_json)

    stopped = ""
    try:
        with display:
            if left:
                launcher.run(sweep, [sweep.point(cell.key) for cell in left], report)
    except KeyboardInterrupt as interrupt:
        stopped = str(interrupt) or "stopped; the same command continues from here"
    finally:
        trial.mark(sweep)
    # Looked at again rather than searched for: code that was edited since we began is for the judge to find.
    runs = state.runs_of(sweep)
    cells = [c if c.has_ended else c._replace(run=state.best_of(runs.get(c.key, []))) for c in cells]
    if stopped:
        echo(stopped, err=True)
        sys.exit(130)
    for cell in cells:
        if cell.key in failed:
            echo(_printed(log_of(sweep, cell.key), _NUM_TAIL_LINES), err=True)
            raise RunError(
                f"the {cell.arm.name} with seed {cell.seed} failed: {failed[cell.key].rstrip('.')}; fix it and give "
                "the same command again: what has ended counts.",
                code="training-failed",
            )
    if any(not cell.has_ended and trial.can_train(cell.arm) for cell in cells):
        echo("stopped; the same command continues from here", err=True)
        sys.exit(3)
    return [cell for cell in cells if cell.has_ended]


def _printed(log: Path, num_lines: int = 0) -> str:
    """All that a training printed, or the end of it."""
    try:
        lines = log.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(printable(line) for line in lines[-num_lines:])


def _judge_existing(
    args: Sequence[str], root: Path, judged: Callable[..., Judgement], metrics: Sequence[str], as_json: bool
) -> list[Judgement]:
    """Judges the runs before the first -- against those after each."""
    from rung.compare.judge import planned_seeds
    from rung.compare.looks import judge_and_count

    parts: list[list[str]] = [[]]
    for word in args:
        match = _RANGE.fullmatch(word)
        if word == _BETWEEN:
            parts.append([])
        elif match:  # piano/3..5 is piano/3, piano/4 and piano/5
            first, last = int(match[2]), int(match[3])
            if not first <= last < first + 1000:
                message = f"{word} is not a range of runs; write the smaller number first, as in {match[1]}/3..7"
                raise UserError(message, code="bad-range")
            parts[-1] += [f"{match[1]}/{number}" for number in range(first, last + 1)]
        else:
            parts[-1].append(word)
    if len(parts) < 2 or not all(parts):
        message = "which runs are to be judged? as in `rung ab --judge piano/3..5 -- piano/6..8`"
        raise UserError(message, code="missing-run")
    control, *variants = [[open_run(name, root) for name in part] for part in parts]
    planned = planned_seeds([run for arm in (control, *variants) for run in arm])
    judgements, of = [], []
    for variant in variants:
        found = judge_and_count(control, variant, judged, metrics, planned, len(variants))
        judgements += found
        of += [[run.id for run in variant]] * len(found)
    _print_judgements(judgements, of, {"a_runs": [run.id for run in control]}, control[0], as_json)
    return judgements


def _print_judgements(
    judgements: Sequence[Judgement], of: Sequence[list[str]], more: dict[str, Any], control: Run, as_json: bool
) -> None:
    """One with its pairs and figures; of several variants or metrics one line each. `of` are the runs of each B."""
    from rung.compare.noise import floor_for

    if len(judgements) == 1:
        _print_judgement(judgements[0], {**more, "b_runs": of[0]}, as_json)
        return
    metrics = list(dict.fromkeys(judgement.metric for judgement in judgements))
    floors = [floor_for(control, metric) for metric in metrics]
    if as_json:
        rows = [{**judgement.to_dict(), "b_runs": names} for judgement, names in zip(judgements, of)]
        known = [vars(floor) if floor else None for floor in floors]
        print_json({**more, "metric": metrics[0], "metrics": metrics, "floor": known[0], "variants": rows})
        return
    echo(one_line(f"A: {' '.join(more['a_runs'])}, {', '.join(metrics)}"))
    for metric, floor in zip(metrics, floors):
        of_metric = f" of {metric}" if len(metrics) > 1 else ""
        echo(one_line(f"noise{of_metric}: {floor.words if floor else 'not known; it takes three seeds of one config'}"))
    for judgement, names in zip(judgements, of):
        factor = f" ({judgement.factor})" if judgement.factor else ""
        by = f" by {judgement.metric}" if len(metrics) > 1 else ""
        echo()
        echo(one_line(f"B: {' '.join(names)}{factor}{by}"))
        _print_last(judgement)
    echo(f"\nthe intervals hold jointly: these {len(judgements)} share the error rate of a single one")


def _print_judgement(judgement: Judgement, more: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json({**judgement.to_dict(), **more})
        return
    effect = interval = saved = ""
    if math.isfinite(judgement.targets_saved):
        word = "less" if judgement.targets_saved >= 0 else "more"
        saved = f"; B comes as far as the worse arm with {abs(judgement.targets_saved):.1%} {word} training than A"
    if math.isfinite(judgement.effect):
        effect = f"{judgement.effect:+.6f} in {judgement.metric}, {judgement.percent:+.2f} %{saved}"
    if math.isfinite(judgement.low):
        interval = f"{judgement.confidence}, {judgement.method}, widened for skew"
        interval += f"; sd of a difference {judgement.sd:.2g}"
        interval += f"; p {judgement.p:.2g}" if math.isfinite(judgement.p) else ""
        interval += f"; assumes {judgement.assumes}" if judgement.assumes else ""
    looks = ""
    if judgement.look is not None and math.isfinite(judgement.effect):
        looks = f"{judgement.look} at these arms, by {', '.join(judgement.metrics)}; "
        looks += f"all of them together err in at most {judgement.all_looks_level:.0%}"
    echo()
    if judgement.pairs:
        head = ["seed", "A", "B", f"{judgement.metric} of A", "of B", "B-A"]
        rows = [
            [str(p.seed), " ".join(p.a), " ".join(p.b), f"{p.value_a:.4f}", f"{p.value_b:.4f}", f"{p.difference:+.4f}"]
            for p in judgement.pairs
        ]
        print_table(head, rows, numeric=(0, 3, 4, 5), keep=range(6))
    facts = {
        "factor": judgement.factor,
        "effect": effect,
        "interval": interval,
        "look": looks,
        "noise": judgement.floor.words if judgement.floor is not None else "",
        "final": _two(judgement.a.final, judgement.b.final),
        "best": _two(judgement.a.best, judgement.b.best),
    }
    lines = [f"{name:<9}{text}" for name, text in facts.items() if text]
    lines += [f"because  {text}" for text in (*judgement.confounders, *judgement.reasons)]
    lines += [f"left out {text}" for text in judgement.left_out]
    for line in lines:
        echo(paragraph(one_line(line[9:]), line[:9], " " * 9))
    _print_last(judgement)


def _print_last(judgement: Judgement) -> None:
    echo(paragraph(one_line(judgement.summary_line())), bold=True)
    if judgement.what_next:
        echo(paragraph(one_line(judgement.what_next), "next     ", " " * 9))


def _two(a: float, b: float) -> str:
    return f"{a:.4f} -> {b:.4f}" if math.isfinite(a) and math.isfinite(b) else ""

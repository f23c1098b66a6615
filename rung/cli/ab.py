"""`rung ab`: tries one change with paired seeds, or judges runs that exist."""

from __future__ import annotations

import math
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rung.errors import RunError, UserError
from rung.runs.files import to_json
from rung.runs.query import Run, open_run, ref
from rung.units import duration

if TYPE_CHECKING:
    from rung.cli.trial import Arm, Trial
    from rung.compare.judge import Judgement

_RANGE = re.compile(r"(.+)/(\d+)\.\.(\d+)")
_BETWEEN = "\0"  # stands for the -- between the arms, which click would swallow


class Ab(click.Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--judge" in args:
            args = [_BETWEEN if word == "--" else word for word in args]
        return super().parse_args(ctx, args)


@dataclass
class Asked:
    """What the judge is to be asked, and how the answer is shown."""

    metric: str | None
    delta: float | None
    allowed: tuple[str, ...]
    declared: str | None
    better: str | None
    as_json: bool
    check: bool
    is_verbose: bool

    def options(self) -> dict[str, Any]:
        """What the judge takes by name."""
        names = ("metric", "delta", "allowed", "declared", "better")
        return {name: getattr(self, name) for name in names}


@click.command("ab", cls=Ab, short_help="Try one change, or judge runs that exist.")
@click.argument("words", nargs=-1, metavar="BASE KEY=VALUE... | --judge A... -- B... [-- C...]")
@click.option("--seeds", "num_seeds", type=click.IntRange(1, 1000), default=3, show_default=True,
              help="Pairs to train: the seed of BASE, then the next ones.")  # fmt: skip
@click.option("--why", help="What the change is to show; kept with each run.")
@click.option("--experiment", help="The series to file the runs under; default: that of BASE.")
@click.option("--metric", help="What to judge by, such as full_val/loss; default: that of the best eval of BASE.")
@click.option(
    "--delta", type=click.FloatRange(min=0), help="The smallest difference that matters; default 0.5 % of the loss."
)
@click.option("--allow", "allowed", multiple=True, metavar="NAME",
              help="Do not let it spoil the verdict: sick, environment, packages, budget, a key, ...")  # fmt: skip
@click.option("--better", type=click.Choice(["lower", "higher"]), help="Which side is good, where no run says it.")
@click.option("--declare", "declared", metavar="NAME", help="What was changed on purpose, where it is no key: code.")
@click.option(
    "--aa", "is_aa", is_flag=True, help="No change: train seeds of BASE alone and show how far they lie apart."
)
@click.option(
    "--judge", "is_judging", is_flag=True, help="Train nothing; judge the runs before -- against those after it."
)
@click.option("--dry-run", is_flag=True, help="Show which runs it would take, and stop.")
@click.option("--check", is_flag=True, help="Exit with 1 unless the verdict is BETTER or EQUIVALENT.")
@click.option("--verbose", is_flag=True, help="Show all that the trainings print.")
@click.option("--runs", "root", envvar="RUNG_RUNS", default="runs", show_default=True, show_envvar=True,
              type=click.Path(path_type=Path), help="Folder of the runs.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the judgement as JSON; trainings go to the error output.")
def command(
    words: tuple[str, ...], num_seeds: int, why: str | None, experiment: str | None, metric: str | None,
    delta: float | None, allowed: tuple[str, ...], better: str | None, declared: str | None, is_aa: bool,
    is_judging: bool, dry_run: bool, check: bool, verbose: bool, root: Path, as_json: bool,
) -> None:  # fmt: skip
    """Train BASE and BASE with one change, seed by seed, and say whether the change made it better.

    Runs that are there and equal what would be trained count, BASE too. After Ctrl-C the same command goes on. The
    verdict is BETTER, WORSE, EQUIVALENT (less than delta), UNDECIDED (with how many more pairs it would take),
    CONFOUNDED (more than one thing differs) or INCOMPARABLE (the metric means two things).

    \b
    Examples:
      rung ab piano/6 optimizer.grad_clip=0.5 --why "norm sits at 1.0 from step 300"
      rung ab piano/6 optimizer.grad_clip=0.5 --seeds 5 --dry-run
      rung ab piano/6 --aa
      rung ab --judge piano/6 -- piano/7
      rung ab --judge piano/3..5 -- piano/6..8 --metric full_val/loss --check
      rung ab --judge piano/3..5 -- piano/6..8 -- piano/9..11
    """
    asked = Asked(metric, delta, allowed, declared, better, as_json, check, verbose)
    if delta is not None and not math.isfinite(delta):
        raise UserError(f"--delta {delta} is not a finite number; give the smallest difference that matters, as 0.01")
    if is_judging:
        _judge_existing(words, root, asked)
        return
    from rung.cli.trial import Trial, take_stock

    base, arms = _arms(words, root, is_aa, asked)
    chosen = experiment or str(base.document.get("experiment"))
    seed = base.document.get("seed")
    if not isinstance(seed, int):
        raise RunError(f"{base.id} names no seed, so nothing can be paired with it; start it with `rung train`.")
    name = "A/A" if is_aa else f"A/B {' '.join(arms[-1].words) or declared}"
    seeds = [seed + i for i in range(max(num_seeds, 3) if is_aa else num_seeds)]
    trial = Trial(base, root, arms, seeds, chosen, why or f"{name} of {base.id}", declared)
    trial.now = take_stock(trial)
    _carry_out(trial, asked, dry_run, is_aa)


def _arms(words: Sequence[str], root: Path, is_aa: bool, asked: Asked) -> tuple[Run, list[Arm]]:
    """The base run and its arms, resolved: a mistake in a key ends here, before anything is trained."""
    from rung.cli.resolve import resolve, run_layer
    from rung.cli.trial import Arm, changed_keys, refuse_other_horizon
    from rung.compare.difference import is_of_engine

    if not words or "=" in words[0]:
        raise UserError("which run is the base? as in `rung ab piano/6 optimizer.grad_clip=0.5`")
    base, changes = open_run(words[0], root), tuple(words[1:])
    odd = [word for word in changes if word.startswith(("seed=", "preset=")) or "=" not in word]
    if odd:
        raise UserError(f"{odd[0]!r} is not a change to try: give key=value; seeds are chosen with --seeds N")
    if is_aa and changes:
        raise UserError(f"--aa trains the base alone; leave out {' '.join(changes)}, or leave out --aa")
    if not is_aa and not changes and asked.declared != "code":
        raise UserError("what is the change? give key=value, or --declare code for an edit, or --aa for none")
    if not is_of_engine(base):
        raise UserError(
            f"{base.id} was trained by a loop of its own, which rung cannot start; train both arms with it, three "
            "seeds each, and judge them with `rung ab --judge A... -- B...`"
        )
    layer = run_layer(base.id, base.config(), base.sources())
    recipe = str(base.document.get("recipe"))
    control = Arm("control", (), resolve(recipe, (), base=[layer]))
    if is_aa:
        return base, [control]
    variant = Arm("variant", changes, resolve(recipe, changes, base=[layer]))
    keys = [key for key in changed_keys(control.resolved, variant.resolved) if key not in asked.allowed]
    if changes and not keys:
        raise UserError(f"{' '.join(changes)} changes nothing that is learned: {base.id} has it so already")
    if len(keys) + (asked.declared == "code") > 1:
        what = ", ".join([*keys, *(["code"] if asked.declared == "code" else [])])
        raise UserError(
            f"that is {len(keys) + (asked.declared == 'code')} changes ({what}), and a verdict is about one; try them "
            "one after the other, or take the blame for the others with --allow KEY"
        )
    if not {"budget", "num_steps", "targets"} & set(asked.allowed):
        refuse_other_horizon(base, control.resolved, variant.resolved)
    return base, [control, variant]


def _carry_out(trial: Trial, asked: Asked, dry_run: bool, is_aa: bool) -> None:
    found = trial.find()
    _print_plan(trial, found, asked.as_json)
    busy = [run.id for run in found.values() if run is not None and run.status in ("running", "silent")]
    if busy:
        raise RunError(f"{', '.join(busy)} is still running; wait for it, or stop it, and give the same command again.")
    if dry_run:
        return
    for arm, seed in trial.places():  # what a killed call had no time to mark
        trial.mark(arm, [run for run in [found[arm.name, seed]] if run is not None and trial.is_unmarked(run)])
    for arm, seed in trial.places():
        run = found[arm.name, seed]
        if not _has_ended(run):
            if trial.declared == "code" and arm.name == "control":
                continue  # cannot be trained here: the code is another one
            found[arm.name, seed] = _train(trial, arm, seed, run, asked)
    runs = {arm.name: [r for s in trial.seeds if _has_ended(r := found[arm.name, s]) and r] for arm in trial.arms}
    if is_aa:
        _print_floor(trial, runs["control"], asked)
    else:
        _conclude(trial, runs["control"], runs["variant"], asked)


def _has_ended(run: Run | None) -> bool:
    return run is not None and run.status in ("finished", "diverged")


def _train(trial: Trial, arm: Arm, seed: int, run: Run | None, asked: Asked) -> Run:
    """Trains one run, or goes on with it, and returns what became of it."""
    from rung.cli.trial import STOPPED, follow
    from rung.compare.judge import elapsed_s

    is_quiet = asked.as_json
    click.echo(f"{arm.name}, seed {seed}: {'goes on with ' + run.id if run else 'trains'}", err=is_quiet)
    before = {made.path for made in trial.made()}
    code = follow(trial.command(arm, seed, run), is_quiet, asked.is_verbose)
    made = [one for one in trial.made() if one.path not in before and one.document.get("seed") == seed]
    trial.mark(arm, made)
    if code in STOPPED:
        click.echo("stopped; the same command goes on with what is there", err=True)
        sys.exit(130)
    # Looked at again rather than searched for: code that was edited since we began is for the judge to tell.
    ended = open_run(run.path, trial.root) if run is not None else next(reversed(made), None)
    if ended is None or not _has_ended(ended):
        raise RunError(
            f"the training of the {arm.name} with seed {seed} ended with {code}; mend what it says above and give the "
            "same command again: what has ended counts."
        )
    best = (ended.best or {}).get("loss")
    loss = f", best loss {best:.4f}" if _number(best) else ""
    took = f", {duration(seconds)}" if (seconds := elapsed_s(ended)) else ""
    click.echo(f"  {ended.id} {ended.status}{loss}{took}", err=is_quiet)
    return ended


def _conclude(trial: Trial, control: Sequence[Run], variant: Sequence[Run], asked: Asked) -> None:
    from rung.compare.decide import LOOKS, Looks
    from rung.compare.judge import judge
    from rung.runs.record import append_event

    before = [e for e in trial.base.events("judgement") if e.get("ab") == trial.id and _number(e.get("num_pairs"))]
    counted = [int(e["num_pairs"]) for e in before if e["num_pairs"] >= LOOKS[0]]
    planned = counted[0] if counted else len(trial.seeds)  # what was first looked at was planned; the rest goes on
    said = judge(control, variant, looks=Looks(planned), **asked.options())
    if said.word == "UNDECIDED" and said.more_pairs is not None and not said.is_aa and trial.declared != "code":
        words = [ref(trial.base.path, trial.base.id), *trial.arms[-1].words]
        said.what_next = f"`rung ab {shlex.join(words)} --seeds {len(trial.seeds) + said.more_pairs}` trains them"
    told = {name: value for name, value in said.plain().items() if name not in ("pairs", "floor", "a", "b", "bca")}
    runs = {"a": [run.id for run in control], "b": [run.id for run in variant]}
    append_event(trial.base.path, "judgement", ab=trial.id, overrides=list(trial.arms[-1].words), **runs, **told)
    _show(said, asked, {"ab": trial.id, "a_runs": runs["a"], "b_runs": runs["b"]})


def _judge_existing(words: Sequence[str], root: Path, asked: Asked) -> None:
    from rung.compare.decide import Looks
    from rung.compare.judge import judge

    parts: list[list[str]] = [[]]
    for word in words:
        if word == _BETWEEN:
            parts.append([])
        else:
            parts[-1] += _names(word)
    if len(parts) < 2 or not all(parts):
        raise UserError("which runs are to be judged? as in `rung ab --judge piano/3..5 -- piano/6..8`")
    control, *variants = [[open_run(name, root) for name in part] for part in parts]
    looks = Looks(num_variants=len(variants))
    told = [judge(control, variant, looks=looks, **asked.options()) for variant in variants]
    runs = [[run.id for run in arm] for arm in (control, *variants)]
    if len(told) == 1:
        _show(told[0], asked, {"a_runs": runs[0], "b_runs": runs[1]})
    else:
        _show_many(told, control[0], runs, asked)


def _show_many(told: Sequence[Judgement], control: Run, runs: Sequence[list[str]], asked: Asked) -> None:
    """One line per variant, and how far runs of one config lie apart."""
    from rung.cli.table import one_line
    from rung.compare.noise import floor_for

    metric = told[0].metric
    floor = floor_for(control, metric)
    if asked.as_json:
        variants = [{**said.plain(), "b_runs": names} for said, names in zip(told, runs[1:])]
        known = vars(floor) if floor else None
        click.echo(to_json({"metric": metric, "a_runs": runs[0], "floor": known, "variants": variants}).decode())
    else:
        click.echo(one_line(f"A: {' '.join(runs[0])}, {metric}"))
        click.echo(f"noise: {floor.words if floor else 'not known; three seeds of one config would tell'}")
        for said, names in zip(told, runs[1:]):
            factor = f" ({said.factor})" if said.factor else ""
            click.echo()
            click.secho(one_line(f"B: {' '.join(names)}{factor}"))
            _print_last(said)
        click.echo(f"\nthe intervals hold all at once: each may err in 1/{len(told)} of what one alone may")
    _exit(told, asked)


def _names(word: str) -> list[str]:
    """piano/3..5 is piano/3, piano/4 and piano/5."""
    match = _RANGE.fullmatch(word)
    if not match:
        return [word]
    first, last = int(match[2]), int(match[3])
    if not first <= last < first + 1000:
        raise UserError(f"{word} is not a range of runs; write the smaller number first, as in {match[1]}/3..7")
    return [f"{match[1]}/{number}" for number in range(first, last + 1)]


def _print_plan(trial: Trial, found: dict[tuple[str, int], Run | None], is_quiet: bool) -> None:
    from rung.compare.judge import elapsed_s

    missing = 0
    click.echo(
        f"{trial.base.id} against {' '.join(trial.arms[-1].words) or 'itself'}, {len(trial.seeds)} seeds", err=is_quiet
    )
    for (name, seed), run in found.items():
        if run is None and name == "control" and trial.declared == "code":
            what = "none: its code is not the one here, so it cannot be trained"
        elif run is None or not _has_ended(run):
            missing += 1
            what = "to train" if run is None else f"to go on with {run.id} ({run.status})"
        else:
            what = f"{run.id} is there ({run.status})"
        click.echo(f"  {name:<8} seed {seed}  {what}", err=is_quiet)
    seconds = elapsed_s(trial.base)
    cost = f", about {duration(missing * seconds)} going by {trial.base.id}" if missing and seconds else ""
    click.echo(f"  {missing} run{'s' if missing != 1 else ''} to train{cost}", err=is_quiet)


def _print_floor(trial: Trial, runs: Sequence[Run], asked: Asked) -> None:
    from rung.cli.table import one_line
    from rung.compare.align import main_metric
    from rung.compare.noise import floor_for

    if not runs:
        raise RunError("no run of it has ended; nothing can be said about noise.")
    metric = asked.metric or main_metric(runs[0])
    floor = floor_for(runs[0], metric)
    if asked.as_json:
        click.echo(to_json({"ab": trial.id, "metric": metric, "floor": vars(floor) if floor else None}).decode())
    elif floor is None:
        click.echo(one_line(f"no noise floor: fewer than three seeds of {trial.base.id} ended with a finite {metric}"))
    else:
        click.echo(one_line(f"noise floor of {metric}: {floor.words}"))


def _show(said: Judgement, asked: Asked, more: dict[str, Any]) -> None:
    if asked.as_json:
        click.echo(to_json({**said.plain(), **more}).decode())
    else:
        _print(said)
    _exit([said], asked)


def _exit(told: Sequence[Judgement], asked: Asked) -> None:
    if asked.check and any(said.word not in ("BETTER", "EQUIVALENT") for said in told):
        sys.exit(1)


def _print(said: Judgement) -> None:
    from rung.cli.table import one_line, print_table

    click.echo()
    if said.pairs:
        head = ["seed", "A", "B", f"{said.metric} of A", "of B", "B-A"]
        rows = [
            [str(p.seed), " ".join(p.a), " ".join(p.b), f"{p.value_a:.4f}", f"{p.value_b:.4f}", f"{p.difference:+.4f}"]
            for p in said.pairs
        ]
        print_table(head, rows, numeric=(0, 3, 4, 5))
    facts = {
        "factor": said.factor,
        "effect": _effect(said),
        "interval": _interval(said),
        "noise": said.floor.words if said.floor is not None else "",
        "final": _two(said.a.final, said.b.final),
        "best": _two(said.a.best, said.b.best),
    }
    lines = [f"{name:<9}{text}" for name, text in facts.items() if text]
    lines += [f"because  {text}" for text in (*said.confounders, *said.reasons)]
    lines += [f"left out {text}" for text in said.left_out]
    for line in lines:
        click.echo(textwrap.fill(one_line(line[9:]), 118, initial_indent=line[:9], subsequent_indent=" " * 9))
    _print_last(said)


def _print_last(said: Judgement) -> None:
    from rung.cli.table import one_line

    click.secho(one_line(said.words()), bold=True)
    if said.what_next:
        click.echo(f"next     {one_line(said.what_next)}")


def _effect(said: Judgement) -> str:
    if not math.isfinite(said.effect):
        return ""
    saved = ""
    if math.isfinite(said.targets_saved):
        word = "less" if said.targets_saved >= 0 else "more"
        saved = f"; B comes as far as the worse arm with {abs(said.targets_saved):.1%} {word} training than A"
    return f"{said.effect:+.6f} in {said.metric}, {said.percent:+.2f} %{saved}"


def _interval(said: Judgement) -> str:
    if not math.isfinite(said.low):
        return ""
    words = f"{said.method}, {1 - said.level:.1%}; sd of a difference {said.sd:.2g}"
    words += f"; p {said.p:.2g}" if math.isfinite(said.p) else ""
    return words + (f"; BCa [{said.bca[0]:+.4f}, {said.bca[1]:+.4f}]" if said.bca else "")


def _two(a: float, b: float) -> str:
    return f"{a:.4f} -> {b:.4f}" if math.isfinite(a) and math.isfinite(b) else ""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

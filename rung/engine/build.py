"""Puts a run together: from a config and a recipe to everything that `fit` needs.

Each derived quantity is decided here, once, and kept with its reason in `Setup.derived` and `Setup.chosen`; the user's
own keys are never rewritten.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed

from rung.config import Config
from rung.engine import checkpoint
from rung.engine.budget import Rate
from rung.engine.config import SCRATCH, Engine, Lr
from rung.engine.contract import check_streams
from rung.engine.evaluate import Evaluator, eval_mode
from rung.engine.fingerprints import fingerprint
from rung.engine.flops import Flops, count_flops
from rung.engine.guarded import ObjectiveState
from rung.engine.init_from import external_source, find_checkpoint
from rung.engine.init_from import fingerprint as source_fingerprint
from rung.engine.op_tracer import BoundsCheck
from rung.engine.optim import build_optimizers
from rung.engine.parallel import World, join, share
from rung.engine.precision import Precision, choose_device
from rung.engine.prefetch import BatchLayout, Origin, Prefetcher
from rung.engine.schedule import Schedule
from rung.engine.state import State, frozen_modules
from rung.engine.step import Stepper, seed_torch
from rung.engine.threads import choose_threads, compile_line, cores
from rung.errors import CheckpointError, ConfigError, DataError, RecipeError
from rung.random import Draw, key_of
from rung.recipe import Identity, Notes, Objective, ParameterGroup, Pretrained, Recipe, Sample, Stream
from rung.text import error_text


@dataclass
class Setup:
    """A run that is ready to start."""

    config: Config
    cfg: Engine
    recipe: Recipe
    notes: Notes  # of the recipe
    world: World
    precision: Precision
    streams: Mapping[str, Stream]
    layout: BatchLayout
    schedule: Schedule
    num_steps: int | None  # None when only time ends the run
    state: State
    stepper: Stepper
    evaluator: Evaluator
    flops: Flops = Flops()
    chosen: list[str] = field(default_factory=list)  # what was chosen for the user, with the reason, for the header
    derived: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> Rate:
        train = self.streams["train"]
        return Rate(self.layout.rows_per_step, train.num_rows, train.targets_per_row)

    @property
    def data(self) -> dict[str, Any]:
        """What each stream is, as the record keeps it."""
        return {
            name: {
                "fingerprint": stream.fingerprint,
                "rows": stream.num_rows,
                "baselines": dict(stream.baselines),
                "about": dict(stream.about),
            }
            for name, stream in self.streams.items()
        }

    @property
    def identity(self) -> dict[str, Any]:
        """What the weights mean, as a checkpoint can keep it: in JSON a tuple is a list."""
        identity = self.recipe.identity()
        if not isinstance(identity, Identity):
            raise RecipeError(
                f"identity() returns a {type(identity).__name__}; return Identity(weights=..., metrics=...)",
                code="bad-identity",
            )
        try:
            plain: dict[str, Any] = json.loads(json.dumps(dict(identity.weights)))
        except (TypeError, ValueError) as error:
            raise RecipeError(
                f"identity() must be plain text, numbers and lists ({error})", code="bad-identity"
            ) from None
        return plain

    def definitions(self) -> dict[str, Any]:
        """What each eval counts: what a verdict needs to be the same in both runs."""
        found, identity = {}, self.recipe.identity()
        for name, stream in self.evaluator.streams.items():
            rows = self.evaluator.rows(stream)
            of_all = {
                "eval set": stream.fingerprint,
                "rows": len(rows),
                "rows_hash": hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest(),
                "reduction": "sum over targets / number of targets",
            }
            found[f"eval/{name}"] = {**identity.metrics, **of_all}
            found |= {f"eval/{name}/{part}": {**counts, **of_all} for part, counts in identity.parts.items()}
        return found

    def prefetcher(self, workers: int | None = None) -> Prefetcher:
        """Gathers from where the run stands."""
        return Prefetcher(
            self.streams["train"],
            self.layout,
            self.cfg.seed,
            self.world.device,
            self.cfg.system.data_workers if workers is None else workers,
            Origin(self.state.progress.step, self.state.progress.position),
        )

    def samples(self, draw: Draw) -> Sequence[Sample]:
        """What the recipe makes of the weights as they are; the same for the same weights and draw."""
        seed_torch("sample", draw)
        with eval_mode(self.state.model), self.precision.autocast():
            return self.recipe.sample(self.state.model, draw)

    def save_extra(self) -> dict[str, Any]:
        """What a checkpoint says besides its tensors and numbers."""
        return {
            "identity": self.identity,
            "dtype": self.precision.name,
            "config": self.config.tree(),
            "threads": torch.get_num_threads(),
            "num_ranks": self.world.size,
            "train_fingerprint": self.streams["train"].fingerprint,
        }


def build(
    config: Config, recipe_class: type[Recipe], runs_root: Path, is_training: bool = True, is_new: bool = True
) -> Setup:
    """`is_training` false leaves out what only training needs; `is_new` false leaves init_from to a checkpoint."""
    cfg: Engine = config.view("engine")
    device, why_device = choose_device(cfg.system.device)
    if cfg.system.threads:
        torch.set_num_threads(cfg.system.threads)
    if cfg.system.deterministic:
        torch.use_deterministic_algorithms(True)
    world = join(device, cfg.ddp.backend, cfg.ddp.timeout_minutes)
    precision = Precision(cfg.system.dtype, world.device)

    recipe = recipe_class(config.view("recipe"), cfg.seed)
    streams = recipe.streams()
    check_streams(streams, recipe.streams)
    for name, stream in streams.items():
        if stream.num_rows < 1:
            raise DataError(
                f"the stream {name} has no rows; prepare other data, or leave the stream out", code="data-empty"
            )
    notes = recipe.describe(cfg.init_from)
    if is_new and notes.errors:
        raise ConfigError(" ".join(notes.errors), code="bad-config")
    if world.size > 1:
        _check_ranks(cfg, world)
    layout = share(cfg.data.batch_size, cfg.optimizer.gradient_accumulation_steps, world)
    train = streams["train"]
    rate = Rate(layout.rows_per_step, train.num_rows, train.targets_per_row)

    torch.manual_seed(key_of(cfg.seed, "weights"))
    model = recipe.model()
    cast: dict[str, list[str]] = {}  # dtype -> names
    for name, parameter in model.named_parameters():  # frozen ones may be as small as they like
        if parameter.requires_grad and parameter.dtype != torch.float32:
            cast.setdefault(str(parameter.dtype).removeprefix("torch."), []).append(name)
            parameter.data = parameter.data.float()
    model = model.to(world.device)
    objectives = _checked(recipe.objectives(model))
    trained = [_trained(objective, model, cfg, world, is_training) for objective in objectives]
    frozen: dict[str, str] = {}
    if is_training:  # after objectives(), which may freeze what it does not train
        names = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        frozen = {name: fingerprint(t) for name, t in checkpoint.canonical(model).items() if name in names}
    setup = Setup(
        config=config,
        cfg=cfg,
        recipe=recipe,
        notes=notes,
        world=world,
        precision=precision,
        streams=streams,
        layout=layout,
        schedule=_schedule(cfg.lr, rate),
        num_steps=rate.steps(cfg.optimizer.max_iters),
        state=State(model, trained, precision.loss_scale, frozen=frozen),
        stepper=Stepper(
            model,
            trained,
            precision,
            world,
            rate.rows_per_step * rate.targets_per_row,
            cfg.optimizer.grad_clip,
            cfg.guard.armed_steps,
            cfg.signals.layers_every,
        ),
        evaluator=Evaluator(
            recipe,
            streams,
            trained[0],
            precision,
            world,
            cfg.data.batch_size,
            cfg.eval_iters,
            cfg.seed,
            cfg.system.data_workers,
        ),
    )
    if is_new:
        _init_weights(setup, runs_root)
    _say_what_was_changed(setup, cast)
    if is_training:
        _count_flops(setup, objectives)
        # After the count, which looks at plain operations and counts none twice.
        if cfg.system.activation_checkpointing:
            _checkpoint_blocks(objectives)
        if cfg.system.compile:  # eval_mode knows how to take it off again; a shared module follows its first objective
            wanted = [(module, o.compile.dynamic) for o in objectives for module in o.compile.modules or ()]
            for module, dynamic in {id(module): (module, dynamic) for module, dynamic in reversed(wanted)}.values():
                module.forward = _compiled(module.forward, dynamic)
        _take_threads(setup)
    _explain(setup, why_device)
    return setup


def _say_what_was_changed(setup: Setup, cast: Mapping[str, Sequence[str]]) -> None:
    """What the engine does to a model beyond what its author wrote: a person who compares loops must know it."""

    def some(names: Sequence[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    for dtype, names in cast.items():
        setup.chosen.append(
            f"{len(names)} trained tensors were {dtype} and are float32 now ({some(names)}): in {dtype} small updates "
            "are rounded away; system.dtype sets what forward and backward compute in"
        )
    still = frozen_modules(setup.state.model)
    if still:
        setup.chosen.append(
            f"in eval mode also while training, because all of it is frozen: {some(still)}; its dropout and its "
            "statistics stand still"
        )
    scales = {
        f"{objective.name} {group.get('name', number)}": group.get("lr_scale", 1.0)
        for objective in setup.state.objectives
        for number, group in enumerate(g for optimizer in objective.optimizers for g in optimizer.param_groups)
    }
    if any(scale != 1 for scale in scales.values()):
        setup.derived["lr_scales"] = scales
    setup.derived["changed"] = {"to float32": {d: list(names) for d, names in cast.items()}, "eval mode": still}


def restore(setup: Setup, save: Path | checkpoint.Saved, evaluated: Container[int] = ()) -> None:
    """Puts a run into the state of a checkpoint: the next step will be the one that would have come.

    `evaluated` are the steps at which the record has evals. One at this very step is done again, so that what follows
    stands in one segment of the record, and the best so far is known though the save was made before the eval.
    """
    saved = checkpoint.load(save) if isinstance(save, Path) else save
    path = saved.path
    checkpoint.check_identity(saved, setup.identity)
    here = setup.streams["train"].fingerprint
    if saved.state["train_fingerprint"] != here:
        raise CheckpointError(
            f"{path} was trained on data {saved.state['train_fingerprint']}, the data here is {here}; a resumed run "
            "must see the same data: restore it, or start a new run with init_from",
            code="data-mismatch",
        )
    if saved.state["dtype"] != setup.precision.name:
        raise CheckpointError(
            f"{path} was trained in {saved.state['dtype']}, here it would continue in {setup.precision.name}; "
            f"add system.dtype={saved.state['dtype']}",
            code="dtype-mismatch",
        )
    take_threads_of(setup, saved.state.get("threads"), saved.state.get("num_ranks"))  # old saves do not say
    saved.load_into(setup.state.model)
    setup.state.load_tensors(saved.tensors())
    progress = saved.progress
    if progress.step in progress.eval_steps or progress.step in evaluated:
        setup.state.redo_eval_at = progress.step
    kept = [(s, loss) for s, loss in zip(progress.eval_steps, progress.evals) if s < progress.step]
    progress.eval_steps, progress.evals = [s for s, _ in kept], [loss for _, loss in kept]
    # So is its being the best: the process may have been killed after the save and before it was marked.
    finite = [(loss, s) for s, loss in kept if math.isfinite(loss)]
    progress.best_loss, progress.best_step = min(finite, default=(None, None))
    setup.state.progress = progress


def _check_ranks(cfg: Engine, world: World) -> None:
    """What several processes cannot do together."""
    cadences = {
        "eval_interval": cfg.eval_interval,
        "sample_interval": cfg.sample_interval,
        "checkpoint.every": cfg.checkpoint.every,
    }
    for name, budget in cadences.items():
        if budget.seconds is not None:
            raise ConfigError(
                f"{name}={budget} is a time, and the clocks of {world.size} ranks differ; give steps or epochs",
                code="options-conflict",
            )


def _checked(objectives: Sequence[Objective]) -> list[Objective]:
    """The objectives with lists of parameters, which may have been generators."""
    for objective in objectives:
        if not all(isinstance(group, ParameterGroup) for group in objective.groups):
            raise RecipeError(
                f"objective {objective.name}: groups must be a list of ParameterGroup; write "
                'Objective(name, [ParameterGroup("all", model.parameters())], loss)',
                code="bad-objective",
            )
    objectives = [
        objective._replace(groups=[group._replace(parameters=list(group.parameters)) for group in objective.groups])
        for objective in objectives
    ]
    if not objectives or objectives[0].every != 1:
        raise RecipeError(
            "the first objective is the loss of the run and must be trained at every step: every=1",
            code="bad-objective",
        )
    names = [objective.name for objective in objectives]
    if len(set(names)) < len(names):
        raise RecipeError(f"two objectives have one name ({', '.join(names)}); rename one", code="bad-objective")
    owners: dict[int, str] = {}
    for objective in objectives:
        for group in objective.groups:
            here = f"group {group.name} of {objective.name}"
            for parameter in group.parameters:
                other = owners.setdefault(id(parameter), here)
                if other != here:
                    raise RecipeError(
                        f"a parameter belongs to two groups ({other}, {here}); give it to one", code="bad-objective"
                    )
    return objectives


def _trained(objective: Objective, model: nn.Module, cfg: Engine, world: World, is_training: bool) -> ObjectiveState:
    # In the model's order: neither a norm nor the numbering in a checkpoint depends on how groups are cut.
    order = {id(p): number for number, p in enumerate(model.parameters())}
    parameters = [p for p in objective.parameters if p.requires_grad]
    parameters.sort(key=lambda p: order.get(id(p), len(order)))
    if not parameters:
        raise ConfigError(
            f"objective {objective.name} has no parameter to train: everything it names is frozen",
            code="nothing-to-train",
        )
    optimizers = build_optimizers(objective, parameters, cfg.optimizer, world.device)
    compiles = cfg.system.compile and is_training and objective.compile.modules is None
    loss = _compiled(objective.loss, objective.compile.dynamic) if compiles else objective.loss
    return ObjectiveState(objective.name, loss, parameters, optimizers, objective.every, objective.loss)


def _compiled(function: Callable[..., Any], dynamic: bool | None) -> Callable[..., Any]:
    if dynamic is not False:
        # An analysis that is not made for sizes that vary, and ends torch 2.11 in an assertion.
        from torch._inductor import config as inductor

        inductor.triton.coalesce_tiling_analysis = False
    return torch.compile(function, dynamic=dynamic)


def _checkpoint_blocks(objectives: Sequence[Objective]) -> None:
    blocks = {id(block): block for objective in objectives for block in objective.blocks}
    if not blocks:
        raise ConfigError(
            "system.activation_checkpointing=true, but the recipe names no blocks of its model (Objective.blocks); "
            "set it to false",
            code="not-supported",
        )
    for block in blocks.values():
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats for m in block.modules()):
            raise RecipeError(
                f"a block of {type(block).__name__} has batch norms: computed again, their statistics would count each "
                "batch twice; leave it out of Objective.blocks",
                code="bad-objective",
            )
        # The random state is kept with the inputs, so that dropout is the same the second time.
        block.forward = partial(checkpointed, block.forward, use_reentrant=False, preserve_rng_state=True)


def _schedule(lr: Lr, rate: Rate) -> Schedule:
    schedule = Schedule(
        shape=lr.schedule if lr.decay_lr else "constant",
        peak=lr.learning_rate * lr.scale,
        floor=lr.min_lr * lr.scale,
        start=lr.warmup_start_lr * lr.scale,
        warmup_steps=0 if lr.warmup_iters.is_never else rate.steps(lr.warmup_iters) or 0,
        decay_steps=rate.steps(lr.lr_decay_iters) or 0,
        wsd_decay_fraction=lr.wsd_decay_fraction,
        plateau_factor=lr.plateau_factor,
        plateau_patience=lr.plateau_patience,
    )
    if schedule.shape in ("cosine", "linear", "wsd") and schedule.decay_steps <= schedule.warmup_steps:
        raise ConfigError(
            f"lr.warmup_iters={lr.warmup_iters} is {schedule.warmup_steps} steps, but "
            f"lr.lr_decay_iters={lr.lr_decay_iters} ends the schedule after {schedule.decay_steps}; "
            "shorten the warm-up or lengthen the run",
            code="bad-schedule",
        )
    return schedule


def _init_weights(setup: Setup, runs_root: Path) -> None:
    if setup.cfg.init_from in SCRATCH:
        return
    source = external_source(setup.cfg.init_from)
    if source is not None:
        if not isinstance(setup.recipe, Pretrained):
            raise ConfigError(
                f"{type(setup.recipe).__name__} cannot begin with the weights in {source}; set init_from to a run, a "
                "checkpoint or scratch",
                code="not-supported",
            )
        setup.chosen.append(setup.recipe.load_pretrained(setup.state.model, source))
        setup.derived["weights_from"] = source_fingerprint(source)
        return
    path = find_checkpoint(setup.cfg.init_from, runs_root)
    saved = checkpoint.load(path)
    checkpoint.check_identity(saved, setup.identity)
    differ = saved.load_into(setup.state.model, is_new_run=True)
    setup.derived["weights_from"] = source_fingerprint(path)
    setup.chosen.append(f"weights from {path} (step {saved.step})")
    if differ:
        setup.chosen.append(
            f"{len(differ)} tensors that were frozen there are others here and start as the recipe made them: "
            f"{', '.join(differ[:3])}{', ...' if len(differ) > 3 else ''}"
        )


def _count_flops(setup: Setup, objectives: list[Objective]) -> None:
    """On the first row of the data, before anything is compiled or trained."""
    prefetcher = Prefetcher(setup.streams["train"], BatchLayout(1, 1), setup.cfg.seed, setup.world.device, 0)
    micro = prefetcher.take(1)[0]  # not step 0, at which all that is done every n-th step is due at once
    model = setup.state.model
    training = model.training
    model.eval()  # or one row would move running statistics
    try:
        with setup.precision.autocast(), BoundsCheck(model):  # on CUDA a wrong id would end the process
            setup.flops = count_flops(objectives, micro.batch, micro.draw, setup.world.device, setup.precision.name)
        setup.derived["forward_flops_by_module"] = setup.flops.forward_by_module
    except RecipeError:
        raise
    except Exception as error:  # some models cannot go through it: then there is no count, and no mfu
        setup.chosen.append(f"arithmetic not counted: {error_text(error)}")
    finally:
        model.train(training)


def _take_threads(setup: Setup) -> None:
    """Where neither the user nor the environment says how many."""
    cfg = setup.cfg
    if cfg.system.threads:
        return
    if "OMP_NUM_THREADS" in os.environ:
        setup.derived["why_threads"] = "OMP_NUM_THREADS"
    elif setup.world.device.type == "cpu" and setup.world.size == 1:
        num, why = choose_threads(setup.flops.per_row * cfg.data.batch_size, cores())
        torch.set_num_threads(num)
        setup.derived["why_threads"] = why
    if cfg.system.compile and setup.world.device.type == "cpu":
        flops = setup.flops.per_row * setup.rate.rows_per_step
        line = compile_line(flops, setup.num_steps, cfg.optimizer.max_iters.seconds, torch.get_num_threads())
        setup.chosen += [line] if line else []


def take_threads_of(setup: Setup, num_then: int | None, num_ranks: int | None) -> None:
    """Takes the number of threads that a run had before, where this machine has as many cores: it moves the last digits
    of sums. Another number of ranks adds in another order anyway."""
    num_now = setup.derived["threads"]
    if setup.cfg.system.threads or not num_then or num_then == num_now or num_ranks != setup.world.size:
        return
    if num_then <= cores():
        torch.set_num_threads(num_then)
        setup.derived["threads"] = num_then
        setup.chosen.append(f"threads {num_now} -> {num_then}, as before: the number moves the last digits of sums")
    else:
        setup.chosen.append(f"{num_now} threads, {num_then} before: the last digits of sums will differ")


def _threads_line(setup: Setup) -> str:
    num, why = torch.get_num_threads(), setup.derived.get("why_threads")
    return f"{num} threads{f' ({why})' if why else ''}"


def _explain(setup: Setup, why_device: str) -> None:
    cfg, rate, world, state, precision = setup.cfg, setup.rate, setup.world, setup.state, setup.precision
    device = str(world.device) if world.device.type != "cuda" else torch.cuda.get_device_name(world.device)
    trained = [p for objective in state.objectives for p in objective.parameters]
    trained_ids = {id(p) for p in trained}
    setup.derived |= {
        "parameters": sum(p.numel() for p in state.model.parameters()),
        "trained_parameters": sum(p.numel() for p in trained),
        # ask for a gradient, and no objective trains them: forgotten, or a part that should be frozen
        "left_out": [n for n, p in state.model.named_parameters() if p.requires_grad and id(p) not in trained_ids],
        "rows_per_step": rate.rows_per_step,
        "targets_per_row": rate.targets_per_row,
        "epoch_rows": rate.epoch_rows,
        "num_steps": setup.num_steps,
        "warmup_steps": setup.schedule.warmup_steps,
        "decay_steps": setup.schedule.decay_steps,
        "flops_per_row": setup.flops.per_row,
        "device": device,
        "dtype": precision.name,
        "num_ranks": world.size,
        "threads": torch.get_num_threads(),
    }
    peak, schedule = setup.flops.peak, setup.schedule
    rates = f", from {schedule.start:g} to {schedule.peak:g} to {schedule.floor:g} (lr.scale={cfg.lr.scale:g})"
    exact = "resume and data order exact to the bit" if world.device.type == "cpu" else "data order exact; kernels not"
    setup.chosen += [
        f"{device}{f' ({why_device})' if why_device else ''}, ranks {world.size}, "
        f"{_threads_line(setup)}, {precision.name}{f' ({precision.reason})' if precision.reason else ''}, "
        + (f"peak {peak / 1e12:.0f} TFLOP/s {precision.name}" if peak else "peak unknown, no mfu"),
        f"{rate.rows_per_step} rows a step ({cfg.data.batch_size} x {cfg.optimizer.gradient_accumulation_steps}), "
        f"about {rate.rows_per_step * rate.targets_per_row:.0f} targets; an epoch is "
        f"{rate.epoch_rows / rate.rows_per_step:.1f} steps; {setup.flops.per_row / 1e9:.3g} GFLOP a row",
        f"{exact}; schedule {schedule.shape} over {schedule.decay_steps} steps{rates if cfg.lr.scale != 1 else ''}",
    ]
    if state.frozen:
        tensors = checkpoint.canonical(state.model)
        num_frozen = sum(tensors[name].numel() for name in state.frozen)
        setup.chosen.append(f"{num_frozen:,} parameters are frozen: saves hold their fingerprints in place of them")
    setup.chosen += setup.notes.lines

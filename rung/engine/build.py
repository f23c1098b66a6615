"""Puts a run together: from a config and a recipe to everything that `fit` needs.

Each derived quantity is decided here, once, and kept with its reason in `Setup.derived` and `Setup.chosen`; the user's
own keys are never rewritten.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rung.config import Config
from rung.data.prefetch import Cut, Feed, Origin
from rung.engine import checkpoint
from rung.engine.budget import Rate
from rung.engine.config import SCRATCH, Engine, Lr
from rung.engine.evaluate import Evaluator, eval_mode
from rung.engine.flops import count_flops, peak_flops
from rung.engine.init_from import find_checkpoint, fingerprint, foreign
from rung.engine.lens import WaryLens
from rung.engine.optim import build_optimizers
from rung.engine.parallel import World, join, share
from rung.engine.precision import Precision, choose_device
from rung.engine.schedule import Schedule
from rung.engine.state import State
from rung.engine.step import Stepper, Trained, seed_torch
from rung.errors import CheckpointError, ConfigError, DataError, RecipeError
from rung.recipe import Batch, Draw, Objective, Recipe, Sample, Stream, key_of


@dataclass
class Setup:
    """A run that is ready to start."""

    config: Config
    cfg: Engine
    recipe: Recipe
    world: World
    precision: Precision
    streams: Mapping[str, Stream]
    state: State
    stepper: Stepper
    evaluator: Evaluator
    schedule: Schedule
    cut: Cut
    rate: Rate
    num_steps: int | None  # None when only time ends the run
    chosen: list[str]  # what was chosen for the user, with the reason, for the header
    derived: dict[str, Any]
    flops_per_row: float = 0.0
    counted_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the row that was counted
    peak_flops: float | None = None
    data: dict[str, Any] = field(default_factory=dict)
    redo_eval_at: int | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What the weights mean, as a checkpoint can keep it: in JSON a tuple is a list."""
        try:
            plain: dict[str, Any] = json.loads(json.dumps(dict(self.recipe.identity())))
        except (TypeError, ValueError) as error:
            raise RecipeError(f"identity() must be plain text, numbers and lists ({error})") from None
        return plain

    def definitions(self) -> dict[str, Any]:
        """What each eval counts: what a verdict needs to be the same in both runs."""
        said, found = dict(self.recipe.definition()), {}
        for name, stream in self.evaluator.streams.items():
            rows = self.evaluator.rows(stream)
            rows_hash = hashlib.blake2b(rows.tobytes(), digest_size=8).hexdigest()
            which = {"eval set": stream.fingerprint, "rows": len(rows), "rows_hash": rows_hash}
            found[f"eval/{name}"] = {**said, **which, "reduction": "sum over targets / number of targets"}
        return found

    def feed(self) -> Feed:
        progress = self.state.progress
        return Feed(
            self.streams["train"],
            self.cut,
            self.cfg.seed,
            self.world.device,
            self.cfg.system.data_workers,
            Origin(progress.step, progress.position),
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
            "train_fingerprint": self.streams["train"].fingerprint,
        }


def build(
    config: Config, recipe_class: type[Recipe], runs_root: Path, is_training: bool = True, is_new: bool = True
) -> Setup:
    """`is_training` false leaves out what only training needs; `is_new` false leaves init_from to a checkpoint."""
    cfg: Engine = config.view("engine")
    device, why_device = choose_device(cfg.system.device)
    _set_threads(cfg)
    world = join(device, cfg.ddp.backend)
    precision = Precision(cfg.system.dtype, world.device)
    recipe = recipe_class(config.view("recipe"), cfg.seed)
    if is_new:
        recipe.check_start(cfg.init_from)
    streams = recipe.streams()
    _check_streams(streams)
    _check_clocks(cfg, world)
    cut = share(cfg.data.batch_size, cfg.optimizer.gradient_accumulation_steps, world)
    train = streams["train"]
    rate = Rate(cut.rows_per_step, train.num_rows, train.targets_per_row)

    torch.manual_seed(key_of(cfg.seed, "weights"))
    model = _float32(recipe.model()).to(world.device)
    objectives = [
        objective._replace(parameters=list(objective.parameters), hidden=list(objective.hidden))
        for objective in recipe.objectives(model)
    ]
    _check_objectives(objectives)
    trained = [_trained(objective, cfg, world, is_training) for objective in objectives]
    nominal = rate.rows_per_step * rate.targets_per_row
    setup = Setup(
        config=config,
        cfg=cfg,
        recipe=recipe,
        world=world,
        precision=precision,
        streams=streams,
        state=State(model, trained, precision.loss_scale),
        stepper=Stepper(model, trained, precision, world, nominal, cfg.optimizer.grad_clip, cfg.guard.armed_steps),
        evaluator=Evaluator(
            recipe, streams, trained[0], precision, world, cfg.data.batch_size, cfg.eval_iters, cfg.seed
        ),
        schedule=_schedule(cfg.lr, rate),
        cut=cut,
        rate=rate,
        num_steps=rate.steps(cfg.optimizer.max_iters),
        chosen=[],
        derived={},
    )
    if is_new:
        _init_weights(setup, runs_root)
    if is_training:
        _count(setup, objectives)
        if cfg.system.compile:  # after the count, which looks at plain operations
            _compile_modules(objectives)
    _explain(setup, why_device)
    return setup


def restore(setup: Setup, path: Path, evaluated: Container[int] = ()) -> None:
    """Brings a run back to the state of a checkpoint: the next step will be the one that would have come.

    `evaluated` are the steps at which the record has evals. One at this very step is done again, so that what follows
    stands in one segment of the record, and the best so far is known though the save was made before the eval.
    """
    saved = checkpoint.load(path)
    checkpoint.check_identity(saved, setup.identity)
    fingerprint = setup.streams["train"].fingerprint
    if saved.state["train_fingerprint"] != fingerprint:
        raise CheckpointError(
            f"{path} was trained on data {saved.state['train_fingerprint']}, the data here is {fingerprint}; a resumed "
            "run must see the same data: bring it back, or start a new run with init_from"
        )
    if saved.state["dtype"] != setup.precision.name:
        raise CheckpointError(
            f"{path} was trained in {saved.state['dtype']}, here it would go on in {setup.precision.name}; "
            f"add system.dtype={saved.state['dtype']}"
        )
    checkpoint.load_weights(setup.state.model, saved.weights, path)
    setup.state.load_tensors(saved.tensors())
    progress = saved.progress
    if progress.step in progress.eval_steps or progress.step in evaluated:
        setup.redo_eval_at = progress.step
    kept = [(s, loss) for s, loss in zip(progress.eval_steps, progress.evals) if s < progress.step]
    progress.eval_steps, progress.evals = [s for s, _ in kept], [loss for _, loss in kept]
    # So is its being the best: the process may have been killed after the save and before it was marked.
    finite = [(loss, s) for s, loss in kept if math.isfinite(loss)]
    progress.best_loss, progress.best_step = min(finite, default=(None, None))
    setup.state.progress = progress


def _check_clocks(cfg: Engine, world: World) -> None:
    if cfg.guard.policy == "rollback" and world.size > 1:
        raise ConfigError(
            f"guard.policy=rollback works in one process, this run has {world.size} ranks; use guard.policy=skip"
        )
    cadences = {
        "eval_interval": cfg.eval_interval,
        "sample_interval": cfg.sample_interval,
        "checkpoint.every": cfg.checkpoint.every,
    }
    for name, budget in cadences.items():
        if world.size > 1 and budget.seconds is not None:
            raise ConfigError(
                f"{name}={budget} is a time, on which {world.size} ranks do not agree; give steps or epochs"
            )


def _check_streams(streams: Mapping[str, Stream]) -> None:
    if "train" not in streams:
        raise RecipeError(f"the recipe has no stream called train; it has {', '.join(streams) or 'none'}")
    for name, stream in streams.items():
        if stream.num_rows < 1:
            raise DataError(f"the stream {name} has no rows; prepare other data, or leave the stream out")


def _check_objectives(objectives: Sequence[Objective]) -> None:
    if not objectives or objectives[0].every != 1:
        raise RecipeError("the first objective is the loss of the run and must be trained at every step: every=1")
    names = [objective.name for objective in objectives]
    owners = Counter(id(p) for objective in objectives for p in {id(p): p for p in objective.parameters}.values())
    if len(set(names)) < len(names):
        raise RecipeError(f"two objectives have one name ({', '.join(names)}); rename one")
    if any(number > 1 for number in owners.values()):
        raise RecipeError(f"a parameter belongs to two objectives ({', '.join(names)}); give it to one")


def _set_threads(cfg: Engine) -> None:
    if cfg.system.threads:
        torch.set_num_threads(cfg.system.threads)
    if cfg.system.deterministic:
        torch.use_deterministic_algorithms(True)


def _float32(model: nn.Module) -> nn.Module:
    """Trained weights are float32, whatever made them; frozen ones may be as small as they like."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    return model


def _trained(objective: Objective, cfg: Engine, world: World, is_training: bool) -> Trained:
    parameters = [p for p in objective.parameters if p.requires_grad]
    if not parameters:
        raise ConfigError(f"objective {objective.name} has no parameter to train: everything it names is frozen")
    optimizers = build_optimizers(objective, parameters, cfg.optimizer, world.device)
    compiles = cfg.system.compile and is_training and not objective.modules
    loss = torch.compile(objective.loss, dynamic=False) if compiles else objective.loss
    return Trained(objective.name, loss, parameters, optimizers, objective.every, objective.lr_scale, objective.loss)


def _compile_modules(objectives: Sequence[Objective]) -> None:
    for module in {id(module): module for objective in objectives for module in objective.modules}.values():
        module.forward = torch.compile(module.forward, dynamic=False)  # eval_mode knows how to take it off again


def _schedule(lr: Lr, rate: Rate) -> Schedule:
    shape = lr.schedule
    schedule = Schedule(
        shape=shape if lr.decay_lr else "constant",
        peak=lr.learning_rate,
        floor=lr.min_lr,
        start=lr.warmup_start_lr,
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
            "shorten the warm-up or lengthen the run"
        )
    return schedule


def _init_weights(setup: Setup, runs_root: Path) -> None:
    if setup.cfg.init_from in SCRATCH:
        return
    source = foreign(setup.cfg.init_from)
    if source is not None:
        setup.chosen.append(setup.recipe.adopt(setup.state.model, source))
        setup.derived["weights_from"] = fingerprint(source)
        return
    path = find_checkpoint(setup.cfg.init_from, runs_root)
    saved = checkpoint.load(path)
    checkpoint.check_identity(saved, setup.identity)
    checkpoint.load_weights(setup.state.model, saved.weights, path)
    setup.derived["weights_from"] = fingerprint(path)
    setup.chosen.append(f"weights from {path} (step {saved.step})")


def _count(setup: Setup, objectives: list[Objective]) -> None:
    """FLOPs of a row, on the first row of the data, before anything is compiled or trained."""
    feed = Feed(setup.streams["train"], Cut(1, 1), setup.cfg.seed, setup.world.device, 0)
    micro = feed.take(1)[0]  # not step 0, at which all that is done every n-th step is due at once
    training = setup.state.model.training
    setup.state.model.eval()  # or one row would move running statistics
    try:
        with setup.precision.autocast(), WaryLens(setup.state.model):  # on CUDA a wrong id would end the process
            flops = count_flops(objectives, micro.batch, micro.draw)
    except Exception as error:  # some models cannot go through it: then there is no count, and no mfu
        setup.chosen.append(f"arithmetic not counted: {type(error).__name__}: {error}")
        return
    finally:
        setup.state.model.train(training)
    setup.flops_per_row = flops.per_row
    setup.counted_shapes = row_shapes(micro.batch)
    setup.derived["forward_flops_by_module"] = flops.forward_by_module
    setup.peak_flops = peak_flops(setup.world.device, setup.precision.name)


def row_shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape[1:]) for name, tensor in batch.items()}


def _left_out(state: State) -> list[str]:
    """Parameters that ask for a gradient and that no objective trains: forgotten, or a part that should be frozen."""
    trained = {id(p) for objective in state.objectives for p in objective.parameters}
    return [name for name, p in state.model.named_parameters() if p.requires_grad and id(p) not in trained]


def _explain(setup: Setup, why_device: str) -> None:
    cfg, rate, world = setup.cfg, setup.rate, setup.world
    num_parameters = sum(p.numel() for p in setup.state.model.parameters())
    setup.derived |= {
        "parameters": num_parameters,
        "trained_parameters": sum(p.numel() for o in setup.state.objectives for p in o.parameters),
        "left_out": _left_out(setup.state),
        "rows_per_step": rate.rows_per_step,
        "targets_per_row": rate.targets_per_row,
        "epoch_rows": rate.epoch_rows,
        "num_steps": setup.num_steps,
        "warmup_steps": setup.schedule.warmup_steps,
        "decay_steps": setup.schedule.decay_steps,
        "flops_per_row": setup.flops_per_row,
        "device": str(world.device) if world.device.type != "cuda" else torch.cuda.get_device_name(world.device),
        "dtype": setup.precision.name,
        "num_ranks": world.size,
        "threads": torch.get_num_threads(),
    }
    device = setup.derived["device"]
    peak = (
        f"peak {setup.peak_flops / 1e12:.0f} TFLOP/s {setup.precision.name}"
        if setup.peak_flops
        else "peak unknown, no mfu"
    )
    setup.chosen.append(
        f"{device}{f' ({why_device})' if why_device else ''}, ranks {world.size}, "
        f"{torch.get_num_threads()} threads, {setup.precision.name}"
        f"{f' ({setup.precision.reason})' if setup.precision.reason else ''}, {peak}"
    )
    targets = rate.rows_per_step * rate.targets_per_row
    setup.chosen.append(
        f"{rate.rows_per_step} rows a step ({cfg.data.batch_size} x {cfg.optimizer.gradient_accumulation_steps}), "
        f"about {targets:.0f} targets; an epoch is {rate.epoch_rows / rate.rows_per_step:.1f} steps; "
        f"{setup.flops_per_row / 1e9:.3g} GFLOP a row"
    )
    exact = "resume and data order exact to the bit" if world.device.type == "cpu" else "data order exact; kernels not"
    setup.chosen.append(f"{exact}; schedule {setup.schedule.shape} over {setup.schedule.decay_steps} steps")
    setup.chosen += setup.recipe.remarks()
    setup.data |= {
        name: {
            "fingerprint": s.fingerprint,
            "rows": s.num_rows,
            "baselines": dict(s.baselines),
            "about": dict(s.about),
        }
        for name, s in setup.streams.items()
    }

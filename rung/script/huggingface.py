"""The lab book for the Trainer of Hugging Face transformers.

    from rung.script.huggingface import RungCallback
    Trainer(..., callbacks=[RungCallback("mine", why="...")])

Each step is a guarded step: one whose loss or gradients are not finite is not applied, and is kept for `rung replay`.
It uses the current run, or starts one with the first training, configured from the training arguments and the model.
Only the first process writes. The run stays open for evals after training, and ends with `rung.finish()`, the next run,
or the script. Rows are numbered as in rung's own runs: a training row by its update, from 0 on, an eval by the updates
made so far. So what the Trainer calls step 10 is row 9 and eval 10.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rung.script import current
from rung.script.run import OwnRun
from rung.script.settings import dotted

if TYPE_CHECKING:
    from rung.script.guard import ScriptGuard

# Arguments that say where and how often something is written, and change nothing that is learned.
_NOT_LEARNING = re.compile(
    r"output_dir|logging_.*|save_.*|run_name|report_to|project|trackio.*|hub_.*|push_to_hub.*|disable_tqdm|log_.*"
    r"|local_rank|overwrite_output_dir|include_num_input_tokens_seen|eval_on_start|.*_strategy|eval_steps|eval_delay"
)
_TOTALS = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")


class Callback:
    """All of it but the base class, which is transformers' own. `guard` is the guard of the training, if it has one."""

    def __init__(
        self, experiment: str | None = None, *, policy: str | None = "stop", every: int = 20, **options: Any
    ) -> None:
        """The arguments of `rung.init`, and what becomes of a step whose loss or gradients are not finite.

        policy: stop raises rung.Diverged and keeps the step for `rung replay`, skip leaves the batch out, None leaves
        it to the Trainer. every: updates between norms per tensor, 0 for none.
        """
        self._experiment, self._policy, self._every, self._options = experiment, policy, every, options
        self._forward_hook: Any = None
        self.guard: ScriptGuard | None = None
        self.run: OwnRun | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if not state.is_world_process_zero:
            return
        model, optimizer = known.get("model"), known.get("optimizer")
        run = self._started(args, model)
        run.derive(num_steps=int(state.max_steps))
        if model is None or run.is_watching or run.path is None:
            return
        if self._policy is not None and (why := _cannot_guard(args, model, optimizer)):
            run.tell(f"steps are recorded but not guarded: {why}")
        elif self._policy is not None:
            self._attach(run, args, model, optimizer, self._policy)
            return
        if self._every:
            run.watch(model, optimizer, every=self._every)

    def _attach(self, run: OwnRun, args: Any, model: Any, optimizer: Any, policy: str) -> None:
        """The guard sees each forward of the model, and takes the optimizer's steps."""
        from rung.script.watch import inner_optimizer

        def loss_of(loss: Any, batch: Mapping[str, Any]) -> Any:
            """As the Trainer divides that of one of several batches; a model that is given a count divides itself."""
            return loss / (1 if batch.get("num_items_in_batch") is not None else int(args.gradient_accumulation_steps))

        guard = self.guard = run.guard(
            model,
            inner_optimizer(optimizer),
            loss=lambda batch: loss_of(model(**batch)["loss"], batch),
            policy=policy,
            armed_steps=0,  # no copies of weights and moments in a memory that others have planned
            layers_every=self._every,
            clips_itself=args.max_grad_norm > 0,
        )

        def seen(module: Any, positional: Any, batch: dict[str, Any], output: Any) -> None:
            if not model.training or guard.has_ended:
                return
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            if loss is None or guard.num_micros >= args.gradient_accumulation_steps:
                self._detach()
                self.guard = None
                run.tell("steps are not guarded: the loss of a batch is not that of one forward of the model")
                if self._every and guard.number == 0:
                    run.watch(model, optimizer, every=self._every)
                return
            guard.micro(loss_of(loss, batch), batch)

        self._forward_hook = model.register_forward_hook(seen, with_kwargs=True)
        guard.attach()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **known: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        run = self._started(args, known.get("model"))
        if "train_runtime" in logs:
            run.summary.update({name: logs[name] for name in _TOTALS if name in logs})
        elif prefix := next((name[: -len("runtime")] for name in logs if re.fullmatch(r"\w+_runtime", name)), None):
            # eval_loss is the loss of the set eval; with several sets eval_wiki_loss is that of wiki.
            name = prefix.rstrip("_")
            group = name.removeprefix("eval_") or name
            found = {key.removeprefix(prefix): value for key, value in logs.items() if key.startswith(prefix)}
            row = {f"eval/{group}/{key}": value for key, value in found.items()}
            run.log({**row, **({"epoch": logs["epoch"]} if "epoch" in logs else {})}, step=state.global_step)
        else:  # under a guard each step has its own loss; the Trainer's is the mean since its last row
            named = {"loss_mean" if name == "loss" and self.guard else name: value for name, value in logs.items()}
            run.log(named, step=max(0, state.global_step - 1))

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if self.guard is not None:
            self._detach()
            self.guard.wait()
        if self.run is not None and state.best_metric is not None:
            self.run.summary["best_metric"] = state.best_metric

    def _detach(self) -> None:
        assert self.guard is not None
        self._forward_hook.remove()
        self.guard.detach()

    def _started(self, args: Any, model: Any) -> OwnRun:
        if self.run is not None and self.run is current.current():
            return self.run
        self.run = current.current()
        if self.run is None:
            # The configuration is the training arguments and that of the model; arguments may be defaults.
            given = args.to_dict()
            config: dict[str, Any] = {name: value for name, value in given.items() if not _NOT_LEARNING.fullmatch(name)}
            config["logging"] = {name: value for name, value in given.items() if name not in config}
            if hasattr(getattr(model, "config", None), "to_dict"):
                config["model"] = model.config.to_dict()
            untouched = {f.name for f in dataclasses.fields(args) if getattr(args, f.name, None) == f.default}
            options = {"seed": getattr(args, "seed", None), **self._options}
            self.run = current.init(self._experiment or getattr(args, "project", None), config, **options)
            keys = [key for key, _ in dotted(config) if key.removeprefix("logging.") in untouched]
            self.run.set_sources(dict.fromkeys(keys, "default"))
        return self.run


def _cannot_guard(args: Any, model: Any, optimizer: Any) -> str:
    """Why the steps of a training cannot be held back by one process; nothing where they can."""
    import torch

    if args.world_size > 1 or args.n_gpu > 1:
        return "several processes or GPUs train together"
    if args.fp16:
        return "the Trainer's gradient scaler decides which steps are applied"
    if args.torch_compile:
        return "the model is compiled"
    if not isinstance(model, torch.nn.Module) or optimizer is None:
        return "the Trainer does not show its model or optimizer"
    return ""


if TYPE_CHECKING:
    RungCallback = Callback


def __getattr__(name: str) -> Any:
    """The class is made when it is asked for: importing transformers takes seconds, and it may not be installed."""
    if name == "RungCallback":
        from transformers import TrainerCallback

        made = type("RungCallback", (Callback, TrainerCallback), {"__module__": __name__, "__doc__": Callback.__doc__})
        globals()[name] = made
        return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""The lab book for the Trainer of Hugging Face transformers.

    from rung.own_loop.huggingface import RungCallback
    Trainer(..., callbacks=[RungCallback("mine", why="...")])

It takes the run that is going on, or starts one with the first training, whose configuration is that of the training
arguments and of the model. Only the first process writes. The run stays open for evals after training, and ends with
`rung.finish()`, the next run, or the script.

The surprising thing: a row of training is numbered by the update it is about, from 0 on, and an eval by the updates
that had been made, as in rung's own runs. So what the Trainer calls step 10 is the row 9 and the eval 10.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rung.own_loop import current
from rung.own_loop.run import OwnRun
from rung.own_loop.settings import dotted

# Arguments that say where and how often something is written, and change nothing that is learned.
_NOT_LEARNING = re.compile(
    r"output_dir|logging_.*|save_.*|run_name|report_to|project|trackio.*|hub_.*|push_to_hub.*|disable_tqdm|log_.*"
    r"|local_rank|overwrite_output_dir|include_num_input_tokens_seen|eval_on_start|.*_strategy|eval_steps|eval_delay"
)
_TOTALS = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")


class Callback:
    """All of it but the base class, which is transformers' own."""

    def __init__(self, experiment: str | None = None, *, every: int = 20, **how: Any) -> None:
        """The words of `rung.init`; `every`: updates between norms per tensor, 0 for no watching."""
        self._experiment, self._every, self._how = experiment, every, how
        self.run: OwnRun | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if not state.is_world_process_zero:
            return
        model = known.get("model")
        run = self._started(args, model)
        run.derive(num_steps=int(state.max_steps))
        if self._every and model is not None and not run.is_watching:
            run.watch(model, known.get("optimizer"), every=self._every)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **known: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        run = self._started(args, known.get("model"))
        if "train_runtime" in logs:
            run.summary.update({name: logs[name] for name in _TOTALS if name in logs})
        elif prefix := next((name[: -len("runtime")] for name in logs if re.fullmatch(r"\w+_runtime", name)), None):
            run.log(_of_eval(logs, prefix), step=state.global_step)
        else:
            run.log(logs, step=max(0, state.global_step - 1))

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if self.run is not None and state.best_metric is not None:
            self.run.summary["best_metric"] = state.best_metric

    def _started(self, args: Any, model: Any) -> OwnRun:
        if self.run is None or self.run is not current.current():
            known = current.current()
            if known is None:
                config, sources = _config(args, model)
                how = {"seed": getattr(args, "seed", None), **self._how}
                known = current.init(self._experiment or getattr(args, "project", None), config, **how)
                known.set_sources(sources)
            self.run = known
        return self.run


def _of_eval(logs: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """eval_loss is the loss of the set eval; with several sets eval_wiki_loss is that of wiki."""
    name = prefix.rstrip("_")
    group = name.removeprefix("eval_") or name
    mine = {f"eval/{group}/{key.removeprefix(prefix)}": value for key, value in logs.items() if key.startswith(prefix)}
    return {**mine, **({"epoch": logs["epoch"]} if "epoch" in logs else {})}


def _config(args: Any, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Training arguments, the model's own configuration, and which of the arguments are defaults."""
    given = args.to_dict()
    config: dict[str, Any] = {name: value for name, value in given.items() if not _NOT_LEARNING.fullmatch(name)}
    config["logging"] = {name: value for name, value in given.items() if _NOT_LEARNING.fullmatch(name)}
    if hasattr(getattr(model, "config", None), "to_dict"):
        config["model"] = model.config.to_dict()
    untouched = {f.name for f in dataclasses.fields(args) if getattr(args, f.name, None) == f.default}
    return config, {key: "default" for key, _ in dotted(config) if key.removeprefix("logging.") in untouched}


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

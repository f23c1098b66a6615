"""A run of somebody's own loop: what the script says of it becomes a run like any other.

The names are those that people know from wandb. Nothing here stops training (never_raise.py): only `rung.init` raises.
Without a record, on ranks other than the first, a run takes everything and writes nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rung.errors import UserError
from rung.files import write_whole
from rung.runs.failure import failure_of
from rung.runs.files import plain, to_json, write_json
from rung.runs.metricnames import eval_of
from rung.runs.query import ref  # here, not at the end of a script: an import then changes its exit code after Ctrl-C
from rung.runs.record import STATUSES, Record, read_document
from rung.script.logged import sort_out
from rung.script.media import parts
from rung.script.missing import OF_A_RUN, missing
from rung.script.never_raise import NeverRaise, never_raise, say
from rung.script.observe import Observer
from rung.script.settings import SCRIPT, Settings, dotted
from rung.script.step_axis import StepAxis
from rung.secrets import without_secrets
from rung.text import error_text

if TYPE_CHECKING:
    from rung.script.guard import ScriptGuard
    from rung.script.watch import Watch

RECIPE = "own loop"
_BETTER = {"lower": "lower", "minimize": "lower", "min": "lower"}
_BETTER |= {"higher": "higher", "maximize": "higher", "max": "higher"}


class OwnRun:
    """What `rung.init` returns."""

    def __init__(self, record: Record | None, tree: dict[str, Any], sources: dict[str, str]) -> None:
        self.out = NeverRaise(record)  # this and `axis` are for those who watch the loop, not for the script
        self.id = record.id if record else ""
        self.path = record.path if record else None  # the folder; None where nothing is written
        self.status = "running" if record else "disabled"
        self._tree, self._sources = tree, sources
        self.config = Settings(tree, self._config_changed)
        self.axis = StepAxis(self.out)
        self.summary = self.axis.summary  # the last value of each name, and whatever the script adds
        self._watches: list[Watch] = []
        self._observer = Observer(self)
        self.trained: set[int] = set()  # ids of the parameters that a known optimizer has
        self._definitions: dict[str, dict[str, Any]] = {}
        self._derived: dict[str, Any] = {}
        self._data: dict[str, Any] = {}
        self._data_rows: dict[str, Any] = {}  # of sets that are arrays, as overlap.py has them
        self._held: dict[str, Any] = {}  # of log(commit=False)
        self._found_out: set[str] = set()  # keys that the script did not set
        self._next_row: dict[str, float] = {}  # what is known of it before it is logged
        self._coverage: Any = None
        self._num_taken = 0  # rows of data, as the script says
        self._folder = ""  # of `dir`, where nothing else is written
        self._has_said_ended = False
        self._started, self._pid = time.monotonic(), os.getpid()

    def __getattr__(self, name: str) -> Any:
        if name in OF_A_RUN:
            return missing(f"run.{name}", self)
        raise AttributeError(f"a run has no {name!r}")

    @property
    def name(self) -> str:
        return self.id

    @name.setter
    def name(self, name: Any) -> None:
        """As `name=` of init: another tag."""
        self.tags = (*self.tags, name)

    @property
    def tags(self) -> tuple[str, ...]:
        return () if self.path is None else tuple(read_document(self.path).get("tags") or ())

    @tags.setter
    def tags(self, tags: Sequence[Any]) -> None:
        self.out.do(Record.update, tags=[*dict.fromkeys(map(str, tags))])

    @property
    def dir(self) -> str:
        """A folder for files of the script's own, in the run."""
        if self.path is None:
            import tempfile

            self._folder = self._folder or tempfile.mkdtemp()
            return self._folder
        self.out.do(lambda record: (record.path / "files").mkdir(exist_ok=True))
        return str(self.path / "files")

    @property
    def step(self) -> int:
        """Where the run stands."""
        return self.axis.step

    @never_raise
    def log(self, data: Any, step: int | None = None, commit: bool = True, **unknown: Any) -> None:
        """Names and numbers: a row of training, an eval, or both. Without `step` rows of training count from 0."""
        if self.out.record is None:
            if self.status != "disabled" and not self._has_said_ended:
                self._has_said_ended = True
                say(f"{self.id} is {self.status}; what is logged now is not kept")
            return
        if unknown:
            self.tell(f"log({', '.join(unknown)}=) is unknown and ignored")
        if type(data) is not dict and not isinstance(data, Mapping):
            self.tell(f"log() takes a dict of names and numbers, not {type(data).__name__}; it was left out")
            return
        if self._held or not commit:
            data, self._held = {**self._held, **data}, {}
            if not commit and step is None:
                self._held = data
                return
        logged = sort_out(data)
        for name, why in logged.odd.items():
            self.tell(f"{name!r} {why}; it was not kept", f"odd {name}")
        is_train = bool(logged.row) and not logged.is_eval_only
        self._observer.row(logged.row, is_train, logged.evals)
        if is_train and self._next_row:
            logged.row, self._next_row = {**self._next_row, **logged.row}, {}
        at = self.step if step is None else step  # where the row beside them belongs
        if logged.row or logged.evals or not logged.media:
            self.axis.log(logged, step)
        for name, value in logged.media.items():
            self._keep(name, value, at)

    def _keep(self, name: str, value: Any, step: int | None) -> None:
        """Pictures, sound, tables and histograms that were logged, as samples."""
        for of, one in parts(name, value):
            try:
                file, content = one.content(of)
            except Exception as error:  # an object of any kind, whose conversion may fail in any way
                self.tell(f"{name!r} was not kept: {error}", f"odd {name}")
                continue
            self.sample(file, content, one.caption, step, one.rate)

    @never_raise
    def targets(self, count: int) -> None:
        """Adds to the predictions that the next row of training counts."""
        self.axis.targets(count)

    @never_raise
    def rows(self, ids: Any) -> None:
        """The numbers of the rows that the next step trains on: `run.rows(index)`. With `run.data("train", ..)` the
        doctor then sees whether they are shuffled, and whether all of them come."""
        if self.out.record is None:
            return
        import numpy as np

        ids = np.asarray(_host(ids)).reshape(-1).astype(np.int64)
        if self._coverage is None:
            from rung.engine.recorder import Coverage

            # Without the size of the data an epoch has no end: then only their order is known.
            self._coverage = Coverage(int(self._derived.get("epoch_rows") or 2**62))
        known = self._coverage.note(ids, self._num_taken)
        self._num_taken += len(ids)
        if self._derived.get("rows_per_step") is None:
            self.derive(rows_per_step=len(ids))
        self._next_row |= known

    @never_raise
    def without(self, name: str, losses: Any, losses_without: Any) -> None:
        """What an input is worth: the losses of the rows of an eval with it, and of the same rows without it."""
        if self.out.record is None:
            return
        import numpy as np

        from rung.engine.probes import rise

        # Each row as the sum and the count of one.
        pairs = [
            np.stack([values, np.ones_like(values)], axis=1)
            for values in (np.asarray(_host(some), np.float64).reshape(-1) for some in (losses, losses_without))
        ]
        if pairs[0].shape != pairs[1].shape or not len(pairs[0]):
            self.tell(
                f"without({name!r}) compares the losses of the same rows; {len(pairs[0])} and {len(pairs[1])} differ"
            )
            return
        key = f"probe/without_{name}"
        found = dict(zip((key, f"{key}_low", f"{key}_high"), rise(pairs[0], pairs[1])))
        self.axis.measured(found)

    @never_raise
    def define_metric(self, name: str, better: str | None = None, **definition: Any) -> None:
        """Says what a metric counts: better="lower" or "higher", eval_set=, mask=, ignored_ids=, reduction=."""
        for other in ("goal", "summary"):  # as wandb has it
            better = better or _BETTER.get(str(definition.pop(other, None)))
        for other in ("step_metric", "step_sync", "hidden", "overwrite"):
            definition.pop(other, None)
        if better is not None and better not in _BETTER:
            self.tell(f"better={better!r} of {name!r} is neither lower nor higher; ignored")
            better = None
        said = {("eval set" if key == "eval_set" else key): value for key, value in definition.items()}
        of = eval_of(name)
        key = f"eval/{of.set}/{of.name}" if of else name
        whole = f"eval/{of.set}" if of and of.name == "loss" else key  # what the loss counts, its set counts
        for at, known in ((whole, said), (key, {"better": _BETTER[better]} if better else {})):
            self._definitions[at] = {**self._definitions.get(at, {}), **known}
        self.keep("definitions.json", {key: known for key, known in self._definitions.items() if known})

    @never_raise
    def data(self, name: str, what: Any, **about: Any) -> None:
        """Notes what a set of data is, by its fingerprint: a file, a folder, text, bytes, an array or a tensor.
        `name` is train, or that of an eval set."""
        if self.out.record is None:
            return
        from rung.script.artifacts import fingerprint

        try:
            self._data[name] = {**fingerprint(what), "about": about}
        except Exception as error:  # whatever holds data fails in its own ways
            self.tell(f"the data {name!r} could not be read: {error}")
            return
        if name == "train" and (rows := self._data[name].get("rows")):
            self.derive(epoch_rows=rows)
        self.keep("data.json", self._data)
        self._compare_rows(name, what)

    def _compare_rows(self, name: str, what: Any) -> None:
        """Of two sets that were told: whether rows of the one are in train."""
        from rung.script.overlap import overlap, rows_of

        if (rows := rows_of(what)) is None:
            return
        self._data_rows[name] = rows
        train = self._data_rows.get("train")
        for other in self._data_rows if name == "train" else [name]:
            if train is not None and "train" not in other and (found := overlap(train, self._data_rows[other])):
                self.out.event("overlap", step=self.axis.last, set=other, **found._asdict())

    @never_raise
    def watch(self, model: Any, optimizer: Any = None, every: int = 20, share: float = 0.002, **unknown: Any) -> None:
        """Measures each update of `optimizer`, or of whichever steps the model: norm of the gradients and lr, and norms
        per tensor in the first ones and then at every `every`-th; fewer norms where they would take more than `share`
        of the time, as with fast steps on a CPU (1: all of them)."""
        if self.out.record is None:
            return
        if unknown:
            self.tell(f"watch({', '.join(unknown)}=) is unknown and ignored")
        from rung.script.watch import Watch

        try:
            self._watches.append(Watch(self, model, optimizer, every, share))
            self.axis.updates.is_watched = self._observer.is_measured = True
        except UserError as error:
            self.tell(str(error))

    def guard(self, model: Any, optimizer: Any, loss: Any = None, **options: Any) -> ScriptGuard:
        """`rung.guard` with its captures in this run, and what it notices in the run's events."""
        from rung.script.guard import guard

        return guard(model, optimizer, loss, run=self, **options)

    @never_raise
    def sample(
        self, name: str | Path, data: Any = None, caption: str = "", step: int | None = None, rate: int | None = None
    ) -> Path | None:
        """Keeps a file, text, bytes, a picture, a figure, or sound with `rate`; returns where."""
        if self.out.record is None:
            return None
        from rung.script.artifacts import artifact

        self.axis.forget_time()
        try:
            file, content = artifact(name, data, rate)
            return self.out.record.add_sample(self.step if step is None else int(step), file, content, str(caption))
        except Exception as error:  # whatever draws a picture fails in its own ways
            self.tell(f"the sample {str(name)!r} was not kept: {error}", "sample")
            return None

    @never_raise
    def note(self, text: str) -> None:
        self.out.event("note", step=self.step, text=str(text))

    def tell(self, text: str, about: str | None = None) -> None:
        """To the user, once."""
        self.out.tell(text, about)

    @never_raise
    def finish(
        self,
        status: str | int | None = None,
        reason: str = "",
        quiet: bool | None = False,
        exit_code: int | None = None,
    ) -> None:
        """Ends the run: finished, stopped, crashed or diverged. A number is an exit code, as wandb has it."""
        record, status = self.out.record, exit_code if status is None else status
        if record is None or os.getpid() != self._pid:  # a child of a fork
            return
        if isinstance(status, int):
            status, reason = ("crashed", reason or f"exit code {status}") if status else ("finished", reason)
        status = status or "finished"
        if status not in STATUSES:
            self.tell(f"{status!r} is not an end of a run ({', '.join(STATUSES)}); taken as finished")
            status = "finished"
        for watch in self._watches:
            watch.remove()
        self._observer.close()
        if (reads := self.config._reads).is_complete:  # what others have found out is not the script's to read
            unread = [key for key, _ in dotted(self._tree) if key not in reads.keys | self._found_out]
            self.out.event("unread_keys", step=self.axis.last, keys=unread)
        totals = {**self.axis.close(), "elapsed_s": time.monotonic() - self._started}
        summary: dict[str, Any] = {}
        for name, value in self.summary.items():  # anything may be in it
            try:
                value = value.item() if hasattr(value, "is_cpu") and value.numel() == 1 else value
                to_json(value)
            except Exception:  # a device that has failed, a dict that holds itself
                value = f"a {type(value).__name__} that cannot be written"
            summary[str(name)] = value
        fields = {"totals": totals, "last_step": self.axis.last, "summary": summary, "reason": reason or None}
        if not self.out.do(Record.finish, status, **fields):
            self.out.close()
            self.out.do(Record.close)
        self.out.record, self.status = None, status
        if not quiet:
            why, best = f": {reason}" if reason else "", self.axis.best
            words = f", best {best['set']} loss {best['loss']:.4f} at step {best['step']}" if best else ""
            say(f"{self.id} {status}{why}{words}; rung show {ref(record.path, self.id)}")

    # What follows is for those who watch the loop, not for the script.

    def end_by(self, error: BaseException | None, failure: Mapping[str, Any] | None = None) -> None:
        """Ends the run as a script that raised this, or nothing, has ended it; what is known of the error is kept."""
        status, reason = ending(error)
        if self.out.record is not None and os.getpid() == self._pid and status in ("crashed", "diverged"):
            try:
                failure = failure or (failure_of(error) if error is not None else {})
            except Exception:  # an error whose text cannot be made
                failure = {"error": type(error).__name__}
            self.out.do(Record.update, failure=failure)
            self.out.event("crash", step=self.axis.last, status=status, **failure)
        self.finish(status, reason)

    @property
    def tree(self) -> Mapping[str, Any]:
        """The configuration, read by others than the script."""
        return self._tree

    @property
    def is_watching(self) -> bool:
        return bool(self._watches)

    def take_over(self, model: Any, optimizers: Sequence[Any], clip: float) -> None:
        """A guard measures the updates of these optimizers from now on, and says more than a watch can."""
        from rung.script.watch import CLIP_NAMES, describe_optimizers, describe_start

        for watch in self._watches:
            watch.remove()
        self._watches.clear()
        self._observer.is_measured = True
        describe_start(self, model)
        describe_optimizers(self, optimizers, model)
        if clip:
            self.add_config({"optimizer.grad_clip": (clip, CLIP_NAMES)})

    def derive(self, **facts: Any) -> None:
        """What was found out rather than chosen: parameters, device."""
        self._derived |= facts
        self.out.do(Record.update, derived=self._derived)

    def keep(self, name: str, document: Mapping[str, Any]) -> None:
        """A document of the run, whole."""
        self.out.do(lambda record: write_json(record.path / name, document))

    def add_config(self, found: Mapping[str, tuple[Any, Sequence[str]]]) -> None:
        """Dotted keys that somebody other than the script found out, each with a value and what a script would call it:
        then it follows from the script's key. Where the script has the very key, it stays away."""
        for key, (value, others) in found.items():
            # Only a key that has this very value: a script may call something else by the same name.
            origin = next((n for n, said in dotted(self._tree) if _names(n, others) and _holds(said, value)), None)
            *branches, leaf = key.split(".")
            node: Any = self._tree
            for branch in branches:
                node = node.setdefault(branch, {}) if isinstance(node, dict) else None
            if isinstance(node, dict) and leaf not in node:
                self._found_out.add(key)
                node[leaf], self._sources[key] = value, f"derived: from {origin}" if origin else "the optimizer"
        self._write_config()

    def set_sources(self, sources: Mapping[str, str]) -> None:
        """Who set values, where somebody knows better than that it was the script."""
        self._sources |= sources
        self._write_config()

    def _config_changed(self, values: Mapping[str, Any]) -> None:
        """Before the first row it is part of the configuration; later it is also something that happened."""
        has_begun = self.axis.has_begun
        self._sources |= dict.fromkeys(values, f"changed at step {self.step}" if has_begun else SCRIPT)
        self._write_config()
        if has_begun:
            self.out.event("config", step=self.step, values=without_secrets(dict(values)))

    def _write_config(self) -> None:
        import yaml  # type: ignore[import-untyped]

        if self.path is None:
            return
        path, there = self.path, {key for key, _ in dotted(self._tree)}
        self._sources = {key: source for key, source in self._sources.items() if key in there}
        text: str = yaml.safe_dump(plain(without_secrets(self._tree)), sort_keys=False, allow_unicode=True)
        self.out.do(lambda record: write_whole(path / "config.yaml", text.encode()))
        self.keep("config.sources.json", self._sources)

    def __enter__(self) -> OwnRun:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end_by(error)


def _host(values: Any) -> Any:
    """A tensor on the host, without its graph; anything else as it is."""
    return values.detach().cpu() if hasattr(values, "detach") else values


def _names(key: str, others: Sequence[str]) -> bool:
    return key.rpartition(".")[2].lower() in others


def _holds(said: Any, value: Any) -> bool:
    """Whether a key says this value: itself, as text, or among others, as betas do."""
    if isinstance(said, list | tuple):
        return any(_holds(one, value) for one in said)
    if isinstance(said, str):
        return said.lower() == str(value).lower()
    return type(said) in (bool, int, float) and bool(said == value)


def ending(error: BaseException | None) -> tuple[str, str]:
    """Status and reason of a script that ended like this."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return "finished", ""
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "interrupted"
    if type(error).__name__ == "Diverged":  # (by name: torch is not imported for it)
        return "diverged", str(getattr(error, "facts", {}).get("reason") or error)
    return "crashed", f"exit {error.code}" if isinstance(error, SystemExit) else error_text(error)

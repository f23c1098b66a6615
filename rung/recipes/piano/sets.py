"""Which records a run trains on and which it is evaluated on.

With `extra_datasets` only those are trained on, and the base only validates; without, the base does both. A record of
the training data that also occurs in the validation or test split of the base is left out, and so is one that an
earlier of the extra sets has.

The one surprising thing is that records are the same only where every note is: another take of a held-out piece, or the
same take with the pedal, cannot be told from other music, and is trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from rung.data.store import Store, place
from rung.data.stream import Joined
from rung.errors import ConfigError, DataError, UserError
from rung.recipe import Stream
from rung.recipes.piano.augment import Augment
from rung.recipes.piano.config import Config
from rung.recipes.piano.data import digests, unigram_nats
from rung.recipes.piano.ngram import NGram
from rung.recipes.piano.rows import Performances, Records, TaskRows
from rung.recipes.piano.sequence import TOKENIZER, is_by
from rung.recipes.piano.tasks import Choice
from rung.recipes.piano.tokenizer import VOCAB_SIZE

LEFT_OUT = "..."  # as people write a list that they do not want to show
EVENTS = ("kind", "pitches", "velocity_bins", "time_steps", "unit_s")  # what gives the ids of a store their meaning


class Sets:
    def __init__(self, cfg: Config, choices: Sequence[Choice]) -> None:
        """`choices` are the tasks; none: rows are windows, for the next token."""
        self._dataset, self._data, self._choices = cfg.dataset, cfg.data, list(choices)
        self._has_prefix, self._only_answers = cfg.data.prefix_tokens, cfg.loss_masking == "finetuning"
        augmentation = cfg.dataset.augmentation
        self._augment = Augment(tuple(augmentation.speed_change_factors), augmentation.max_pitch_shift)
        # Tasks need it for completions alone; without any it is not read, and told as unused.
        self._has_ngram = (not choices or cfg.evaluation.completed > 0) and cfg.evaluation.ngram
        self._composers = list(cfg.dataset.eval_composers)
        self.remarks: list[str] = []  # what was decided on the way

    @cached_property
    def base(self) -> Store:
        return self._open(self._dataset.base_dataset_name, "base_dataset_name")

    @cached_property
    def extras(self) -> dict[str, Store]:
        names = [name for name in self._dataset.extra_datasets if name != LEFT_OUT]
        if LEFT_OUT in self._dataset.extra_datasets:
            base = self._dataset.base_dataset_name
            meanwhile = "those beside it are trained on" if names else f"the train split of {base} is trained on"
            self.remarks.append(f"dataset.extra_datasets has {LEFT_OUT!r}, names that are left out: {meanwhile}")
        return {name: self._open(name, "extra_datasets") for name in names}

    @cached_property
    def _training(self) -> list[Records]:
        base = self._dataset.base_dataset_name
        if not self.extras:
            return [_records(self.base, "train", base)]
        held_out, earlier = digests(self.base, "validation") | digests(self.base, "test"), set[str]()
        found = []
        for name, store in self.extras.items():
            whole = _records(store, "train", name)
            if _sustains(store) != _sustains(self.base):
                self.remarks.append(
                    f"{name} has the pedal otherwise than {base}: copies of what is held out are not found"
                )
            own = [store.index[n]["digest"] for n in whole.numbers.tolist()]
            is_held, is_again = (np.array([one in some for one in own], dtype=bool) for some in (held_out, earlier))
            for which, where in ((is_held, f"held out in {base}"), (is_again & ~is_held, "in another set before it")):
                if which.any():
                    self.remarks.append(f"{which.sum()} of {len(own)} records of {name} are {where}: not trained on")
            earlier |= set(own)
            if not (is_held | is_again).all():
                found.append(whole._replace(numbers=whole.numbers[~(is_held | is_again)]))
        if not found:
            raise DataError(
                f"every record of dataset.extra_datasets is held out in {base}: nothing is left to train on; name "
                "other sets, or none to train on the train split of the base"
            )
        return found

    @property
    def trained_on(self) -> str:
        """The name of the first data set of training, as its prefix is told."""
        return self._training[0].dataset

    def train(self) -> Stream:
        if self._choices:
            return self._task_rows(self._training, self._augment)
        parts = [self._windows(some, self._augment) for some in self._training]
        return parts[0] if len(parts) == 1 else Joined(parts)

    @cached_property
    def evals(self) -> dict[str, Stream]:
        """full_val, and one for each composer that is in it beside others."""
        whole = _records(self.base, "validation", self._dataset.base_dataset_name)
        sets = {"full_val": self._fixed(whole)}
        for composer in self._composers:
            is_his = [is_by(str(self.base.index[n].get("composer")), composer) for n in whole.numbers.tolist()]
            if 0 < sum(is_his) < len(is_his):
                sets[composer.lower()] = self._fixed(whole._replace(numbers=whole.numbers[is_his]))
        return sets

    def held_out(self, split: str) -> Stream:
        if split not in self.base.splits:
            raise UserError(f"{self.base.path} has no split {split!r}, only {', '.join(self.base.splits)}")
        return self._fixed(_records(self.base, split, self._dataset.base_dataset_name))

    @cached_property
    def ngram(self) -> NGram | None:
        """A 3-gram model of the training data, where somebody wants to see what that is worth."""
        if not self._has_ngram:
            return None
        return NGram(ids for some in self._training for ids in _ids_of(some))

    def _fixed(self, some: Records) -> Stream:
        if self._choices:
            return self._task_rows([some], None)
        windows = self._windows(some, Augment())
        windows.baselines = {"unigram": _unigram(_ids_of(some))}
        if self.ngram is not None:
            total, count = self.ngram.nats(_ids_of(some))
            windows.baselines |= {"3-gram": total / count}
        return windows

    def _windows(self, some: Records, augment: Augment) -> Performances:
        return Performances(some, self._data.context_size, augment, self._has_prefix)

    def _task_rows(self, records: Sequence[Records], augment: Augment | None) -> TaskRows:
        data = self._data
        rows = TaskRows(records, self._choices, data.notes_per_record, data.context_size, self._has_prefix, augment)
        seen = rows.look(self._only_answers)
        if augment is not None and not any(map(len, seen.targets)):
            raise ConfigError(
                f"not one of {seen.num_rows} rows looked at has its <GENAI> within data.context_size="
                f"{data.context_size}: with loss_masking=finetuning nothing would be learned; lower "
                f"data.notes_per_record={data.notes_per_record} or raise data.context_size"
            )
        rows.baselines = {} if augment is not None else {"unigram": _unigram(seen.targets)}
        rows.targets_per_row = max(float(np.mean([len(ids) for ids in seen.targets])), 1.0)
        rows.about = {
            "source": [some.store.info.get("source") for some in records],
            "split": records[0].split,
            "tokenizer": TOKENIZER.hash,
            "rows_cut": round(seen.cut, 4),
            "rows_unanswered": round(seen.unanswered, 4),
        }
        if augment is not None and seen.cut:
            self.remarks.append(
                f"{100 * seen.cut:.0f} % of {seen.num_rows} rows looked at are longer than data.context_size="
                f"{data.context_size} (the longest would need {seen.longest}) and are cut; "
                f"{100 * seen.unanswered:.0f} % lose their whole answer and count nothing: lower "
                "data.notes_per_record or raise data.context_size"
            )
        return rows

    def _open(self, name: str, key: str) -> Store:
        path = place(name)
        if not path.exists():
            raise DataError(f"no data at {path}; {_how_to_prepare(name)}, or name another with dataset.{key}")
        store = Store.open(path, kind="piano")
        ours, theirs = TOKENIZER.description, store.info["tokenizer"]
        if differing := [what for what in EVENTS if ours[what] != theirs.get(what)]:
            raise DataError(
                f"{path} was written with {differing[0]} {theirs.get(differing[0])}, here it is {ours[differing[0]]}; "
                "prepare it again with `rung data piano --replace`"
            )
        self._check_settings(path, store.info["settings"])
        return store

    def _check_settings(self, path: Path, was: dict[str, object]) -> None:
        """A key of preparation that differs from how the data was prepared would silently do nothing."""
        asked: dict[str, object] = {"pause_detection_threshold": self._dataset.pause_detection_threshold}
        if self._dataset.sustain is not None:
            asked["sustain"] = self._dataset.sustain
        for name, value in asked.items():
            if value != was.get(name, False):
                raise DataError(
                    f"dataset.{name}={_shown(value)}, but {path} was prepared with {_shown(was.get(name, False))}; "
                    "prepare it again with `rung data piano --replace`, or set it to what the data has"
                )


def _sustains(store: Store) -> bool:
    return bool(store.info["settings"].get("sustain", False))


def _shown(value: object) -> str:
    """As a config spells it."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def _records(store: Store, split: str, name: str) -> Records:
    return Records(store, split, np.asarray(store.split(split)), f"{name} {store.info.get('source', '')}")


def _ids_of(some: Records) -> list[np.ndarray]:
    store, tokens = some.store, some.store.arrays["tokens"]
    return [tokens[store.starts[n] : store.starts[n] + store.lengths[n]] for n in some.numbers.tolist()]


def _unigram(sequences: Iterable[np.ndarray]) -> float:
    """Nats per token of the best model that ignores all context, fitted to these very sequences."""
    histogram = np.zeros(VOCAB_SIZE, dtype=np.int64)
    for ids in sequences:
        histogram += np.bincount(ids, minlength=VOCAB_SIZE)
    return unigram_nats(histogram)


def _how_to_prepare(name: str) -> str:
    if name == "piano":
        return "prepare it with `rung data piano`"
    return f"prepare it with `rung data piano --from FOLDER --name {name}`"

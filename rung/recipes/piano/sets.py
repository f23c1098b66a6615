"""Which records a run trains on and which it is evaluated on.

With `extra_datasets` only those are trained on and the base only validates; without, the base does both. A training
record that also occurs in the validation or test split of the base, or in an earlier extra set, is left out. Records
are the same only where every note is: another take of a held-out piece, or the same take with the pedal, is not
recognised and is trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from rung.data.store import Store, missing, place
from rung.data.stream import Joined
from rung.errors import ConfigError, DataError, UserError
from rung.recipe import Stream
from rung.recipes.piano.config import Config
from rung.recipes.piano.data import digests, unigram_nats
from rung.recipes.piano.ngram import NGram
from rung.recipes.piano.plausibility import Copies
from rung.recipes.piano.rows import Augment, Performances, Records, TaskRows
from rung.recipes.piano.tasks import Choice, is_by
from rung.recipes.piano.tokenizer import EOGENAI, TOKENIZER, VOCAB_SIZE

LEFT_OUT = "..."  # as people write a list that they do not want to show
EVENTS = ("kind", "pitches", "velocity_bins", "time_steps", "unit_s")  # what gives the ids of a store their meaning


class Sets:
    def __init__(self, cfg: Config, choices: Sequence[Choice]) -> None:
        """`choices` are the tasks; none: rows are windows, for the next token."""
        self._dataset, self._data, self._choices = cfg.dataset, cfg.data, list(choices)
        self._only_answers = cfg.loss_masking == "finetuning"
        self._has_state, self._moves = cfg.loss_grammar or cfg.model.sounding_keys, cfg.data.moving_cuts
        augmentation = cfg.dataset.augmentation
        self._augment = Augment(tuple(augmentation.speed_change_factors), augmentation.max_pitch_shift)
        # Tasks need it for completions alone; without any the key is not read, and is reported as unused.
        self._has_ngram = (not choices or cfg.evaluation.completed > 0) and cfg.evaluation.ngram
        self._composers = list(cfg.dataset.eval_composers)
        self.remarks: list[str] = []  # what was decided on the way

    @cached_property
    def base(self) -> Store:
        return self._open(self._dataset.base_dataset_name, "base_dataset_name")

    @cached_property
    def _training(self) -> list[Records]:
        base = self._dataset.base_dataset_name
        names = [name for name in dict.fromkeys(self._dataset.extra_datasets) if name != LEFT_OUT]
        if LEFT_OUT in self._dataset.extra_datasets:
            meanwhile = "those beside it are trained on" if names else f"the train split of {base} is trained on"
            self.remarks.append(f"dataset.extra_datasets has {LEFT_OUT!r}, names that are left out: {meanwhile}")
        if not names:
            return [_records(self.base, "train", base)]
        held_out, earlier = digests(self.base, "validation") | digests(self.base, "test"), set[str]()
        found = []
        for name in names:
            store = self._open(name, "extra_datasets")
            whole = _records(store, "train", name)
            if _setting(store, "sustain") != _setting(self.base, "sustain"):
                self.remarks.append(
                    f"{name} treats the pedal differently from {base}: copies of held-out records cannot be found"
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
                "other sets, or none to train on the train split of the base",
                code="data-empty",
            )
        return found

    @property
    def trained_on(self) -> str:
        """The name of the first data set of training, as its prefix gives it."""
        return self._training[0].dataset

    def train(self) -> Stream:
        if self._choices:
            return self._task_rows(self._training, self._augment)
        parts = [self._windows(some, self._augment, is_training=True) for some in self._training]
        return parts[0] if len(parts) == 1 else Joined(parts)

    @cached_property
    def evals(self) -> dict[str, Stream]:
        """full_val, and one for each composer that is in it beside others."""
        whole = _records(self.base, "validation", self._dataset.base_dataset_name)
        sets = {"full_val": self._fixed(whole)}
        for composer in self._composers:
            is_own = [is_by(str(self.base.index[n].get("composer")), composer) for n in whole.numbers.tolist()]
            if 0 < sum(is_own) < len(is_own):
                sets[composer.lower()] = self._fixed(whole._replace(numbers=whole.numbers[is_own]))
        return sets

    def held_out(self, split: str) -> Stream:
        if split not in self.base.splits:
            raise UserError(
                f"{self.base.path} has no split {split!r}, only {', '.join(self.base.splits)}", code="no-split"
            )
        return self._fixed(_records(self.base, split, self._dataset.base_dataset_name))

    @cached_property
    def ngram(self) -> NGram | None:
        """A 3-gram model of the training data, where it is asked for."""
        if not self._has_ngram:
            return None
        return NGram(some.ids(n) for some in self._training for n in some.numbers.tolist())

    @cached_property
    def copies(self) -> Copies:
        """What the training data has of runs of notes."""
        return Copies(TOKENIZER.decode(some.ids(n)) for some in self._training for n in some.numbers.tolist())

    @cached_property
    def held_out_notes(self) -> list[np.ndarray]:
        """Every record of the base that is not trained on."""
        numbers = [n for split in ("validation", "test") if split in self.base.splits for n in self.base.split(split)]
        some = Records(self.base, "", np.array(numbers, dtype=np.int64), "")
        return [TOKENIZER.decode(some.ids(n)) for n in numbers]

    def _fixed(self, some: Records) -> Stream:
        if self._choices:
            return self._task_rows([some], None)
        windows = self._windows(some, Augment())
        records = [some.ids(n) for n in some.numbers.tolist()]
        end = [np.array([EOGENAI])] if self._data.end_token else []
        windows.baselines = {"unigram": _unigram([*records, *end * len(records)])}
        if self.ngram is not None:
            total, count = self.ngram.nats(records)
            windows.baselines |= {"3-gram": total / count}
        return windows

    def _windows(self, some: Records, augment: Augment, is_training: bool = False) -> Performances:
        data = self._data
        return Performances(
            some, data.context_size, augment, data.prefix_tokens, has_state=self._has_state, has_end=data.end_token,
            moves=self._moves and is_training,
        )  # fmt: skip

    def _task_rows(self, records: Sequence[Records], augment: Augment | None) -> TaskRows:
        data = self._data
        rows = TaskRows(records, self._choices, data.notes_per_record, data.context_size, data.prefix_tokens, augment)
        seen = rows.stats(self._only_answers)
        if augment is not None and not any(map(len, seen.targets)):
            raise ConfigError(
                f"none of {seen.num_rows} rows checked has its <GENAI> within data.context_size="
                f"{data.context_size}: with loss_masking=finetuning nothing would be learned; lower "
                f"data.notes_per_record={data.notes_per_record} or raise data.context_size",
                code="bad-range",
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
                f"{100 * seen.cut:.0f} % of {seen.num_rows} rows checked are longer than data.context_size="
                f"{data.context_size} (the longest would need {seen.longest}) and are cut; "
                f"{100 * seen.unanswered:.0f} % lose their whole answer and count nothing: lower "
                "data.notes_per_record or raise data.context_size"
            )
        return rows

    def _open(self, name: str, key: str) -> Store:
        path = place(name)
        if not path.exists():
            raise missing("piano", name, key)
        store = Store.open(path, kind="piano")
        ours, theirs = TOKENIZER.description, store.info["tokenizer"]
        if differing := [what for what in EVENTS if ours[what] != theirs.get(what)]:
            raise DataError(
                f"{path} was written with {differing[0]} {theirs.get(differing[0])}, here it is {ours[differing[0]]}; "
                "prepare it again with `rung data piano --replace`",
                code="data-mismatch",
            )
        # A key of preparation that differs from how the data was prepared would silently do nothing.
        for setting in ("pause_detection_threshold", "sustain"):
            asked, was = getattr(self._dataset, setting), _setting(store, setting)
            if asked is not None and asked != was:
                asked, was = (f"{v:g}" if isinstance(v, float) else str(v).lower() for v in (asked, was))
                raise DataError(
                    f"dataset.{setting}={asked}, but {path} was prepared with {was}; prepare it again with "
                    "`rung data piano --replace`, or set it to what the data has",
                    code="data-mismatch",
                )
        return store


def _setting(store: Store, name: str) -> object:
    return store.info["settings"].get(name, False)  # a store from before there was `sustain` has none


def _records(store: Store, split: str, name: str) -> Records:
    return Records(store, split, np.asarray(store.split(split)), f"{name} {store.info.get('source', '')}")


def _unigram(sequences: Iterable[np.ndarray]) -> float:
    """Nats per token of the best model that ignores all context, fitted to these very sequences."""
    histogram = np.zeros(VOCAB_SIZE, dtype=np.int64)
    for ids in sequences:
        histogram += np.bincount(ids, minlength=VOCAB_SIZE)
    return unigram_nats(histogram)

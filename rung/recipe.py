"""All that the engine knows of a recipe.

A recipe says what is learned: the streams of data, the model, the loss, the samples worth looking at. The engine says
how: steps, precision, schedules, checkpoints, the record. Neither knows the other's business, and nothing here or in
engine/ knows what a token, a frame or a note is.

The one surprising thing is that a loss is never a mean. It is a sum and a count of targets, so that the engine can
divide once, by the count of the whole step, and the result does not depend on how a batch is cut into micros or ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from rung.errors import UserError

if TYPE_CHECKING:  # torch takes seconds to import, and many verbs only want a recipe's Config
    import torch
    from torch import Tensor, nn

Arrays = dict[str, np.ndarray]  # a batch as a stream gathers it: one row per id, on the first axis
Batch = dict[str, "Tensor"]  # the same on the device, as a loss sees it
Part = tuple["Tensor", "Tensor"]  # a sum and its count
Report = Callable[[str, int, int], None]  # what is being done, how much of it is, how much there is


class Loss(NamedTuple):
    """A summed loss over `count` targets, with named parts (per codebook, per task, per class of token).

    The names of the parts must be the same for every batch; a part without targets has the count 0.
    """

    sum: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody wants here
    parts: Mapping[str, Part] = {}


class Objective(NamedTuple):
    """What one optimizer minimises. Most recipes have one; a GAN has two, differentiated at the same weights.

    `hidden` names the matrices that Muon may take; a recipe that leaves it empty can only be trained with AdamW.
    `modules` are what to compile in place of the whole loss, where the loss draws random numbers, loops, or is
    differentiated twice. `betas` stand in for those of the config.
    """

    name: str
    parameters: Iterable[nn.Parameter]
    loss: Callable[[Batch, Draw], Loss]
    every: int = 1
    hidden: Iterable[nn.Parameter] = ()
    lr_scale: float = 1.0  # times the learning rate of the step
    betas: tuple[float, float] | None = None
    modules: Sequence[nn.Module] = ()


class Sample(NamedTuple):
    """One artifact: a file name with its suffix, its bytes, and what a reader should know of it."""

    name: str
    data: bytes
    caption: str = ""


class Input(NamedTuple):
    """Something the model is given and could ignore; `how` says how to take it away: permute, zero or shift."""

    name: str
    tensors: Sequence[str]
    how: str = "permute"


class View(NamedTuple):
    """What one step of a walk shows. Frames are (H, W, 3) uint8."""

    frame: np.ndarray  # what the model dreams
    real: np.ndarray | None  # what was recorded at this point of the path; None off the recorded path
    wanted: Sequence[float]  # the controls that were asked for, in the units of the data
    given: Sequence[float]  # as the model saw them: clamped to the range of the training data


class Walk(Protocol):
    """One visitor's way through a learned world; all that changes with a step is in here."""

    def step(self, intent: Mapping[str, float]) -> View:
        """Goes where the visitor wants: each intent is in units of a brisk move of the training data, 0 if absent."""

    def follow(self) -> View | None:
        """One step along the recorded path, with its controls; None where the recording ends."""


class Player(Protocol):
    """A model that can be walked in. It serves any number of walks, which share nothing but the weights."""

    def about(self) -> dict[str, Any]:
        """Plain data for the page: height, width, rate_hz; controls (a list of name, low, high, is_constant);
        intents (names that `step` understands: forward, right, turn, look, or fewer); places (a list of label, length:
        where a walk can begin, and how many recorded steps follow)."""

    def walk(self, place: int, offset: int = 0) -> Walk:
        """A new walk, `offset` recorded steps after the beginning of a place."""


class Exported(NamedTuple):
    """A module to be written in a form that other programs can run, with an example of what it takes."""

    module: nn.Module
    inputs: Mapping[str, Tensor]  # by name, in the order of the module's arguments; the first axis is the batch
    outputs: Sequence[str]
    notes: Mapping[str, str] = {}  # what each input and output means


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers as a function of (seed, step, row, name), never of what was drawn before.

    `rows` are places in the global batch of the step, so a draw does not change when the batch is shared by other
    ranks or cut into other micros.
    """

    seed: int
    step: int
    rows: np.ndarray

    def uniform(self, name: str, num_values: int = 1) -> np.ndarray:
        """(rows, num_values) float64 in [0, 1)."""
        key = np.uint64(self.key(name))
        counter = self.rows.astype(np.uint64)[:, None] * np.uint64(num_values) + np.arange(num_values, dtype=np.uint64)
        return (scramble(scramble(counter + key) ^ key) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, name: str, high: int | np.ndarray) -> np.ndarray:
        """(rows,) int64 in [0, high)."""
        return (self.uniform(name)[:, 0] * high).astype(np.int64)

    @property
    def is_eval(self) -> bool:
        """Evals draw at step -1, always: what grows with the step, or only regularises, looks here."""
        return self.step < 0

    def noise(self, name: str, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
        """(rows, *shape) float32 in [0, 1), made on the device; the same for a row on any device and in any cut."""
        import torch

        num_values = math.prod(shape)
        first, num_rows = int(self.rows[0]) if len(self.rows) else 0, len(self.rows)
        if np.array_equal(self.rows, np.arange(first, first + num_rows)):  # of a micro: nothing to be sent
            rows = torch.arange(first, first + num_rows, device=device)
        else:
            rows = torch.from_numpy(self.rows.astype(np.int64)).to(device)
        counter = rows[:, None] * num_values + torch.arange(num_values, device=device)
        key = self.key(name)
        bits = _scramble_tensor(_scramble_tensor(counter + key) ^ key)
        return ((bits >> 40) & 0xFFFFFF).float().mul_(2.0**-24).reshape(len(self.rows), *shape)

    def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
        """A torch generator for bulk noise; unlike the row-wise draws it depends on the cut of the batch."""
        import torch

        return torch.Generator(device).manual_seed(self.key(f"{name}/{int(self.rows[0]) if len(self.rows) else 0}"))

    def key(self, name: str) -> int:
        return key_of(self.seed, self.step, name)


def key_of(*parts: object) -> int:
    """63 bits out of any printable parts, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def scramble(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: a bijection on uint64 whose output bits all depend on all input bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _scramble_tensor(x: Tensor) -> Tensor:
    """`scramble` on int64: products wrap as those of uint64 do; a shift must not drag the sign along."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(0x94D049BB133111EB)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


class Stream:
    """One data set, addressed by position.

    A position counts rows since the start of training, not batches: a run resumed with another batch size goes on with
    the next row. `ids` must be a pure function of its arguments; `gather` of its own.
    """

    fingerprint: str  # what the data is, to the byte, and how rows are made of it
    num_rows: int  # rows in one epoch
    targets_per_row: float = 1.0  # targets in a row, on average over the epoch; turns budgets in tokens into steps
    baselines: Mapping[str, float] = {}  # losses of trivial models on this very set, to print beside ours
    about: Mapping[str, Any] = {}  # source, split, tokenizer, ...: what a person calls the parts of the fingerprint
    groups: Sequence[str] = ()  # what rows are told apart by: components of a mixture, composers, maps

    def ids(self, position: int, num_rows: int, seed: int) -> np.ndarray:
        """The rows at [position, position + num_rows): here, each row once per epoch in a seeded order."""
        from rung.data.order import shuffled

        return shuffled(position, num_rows, self.num_rows, seed)

    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        """The named arrays of these rows. Every random choice goes through `draw`."""
        raise NotImplementedError

    def group_of(self, ids: np.ndarray) -> np.ndarray:
        """The number in `groups` of each of these rows; -1 where it has none."""
        return np.full(len(ids), -1)

    def cluster_of(self, ids: np.ndarray) -> np.ndarray:
        """A number for what each row was cut from, a document or a piece: rows of one are no independent draws."""
        return ids

    def places(self, ids: np.ndarray) -> list[dict[str, Any]]:
        """Where each of these rows comes from, in words of the data: document, offset. Listed beside an eval."""
        return [{"row": int(number)} for number in ids]


class Recipe:
    """What to subclass. Only `Config`, `streams`, `model` and `objectives` are required."""

    Config: ClassVar[type[Any]]  # a dataclass of the recipe's own keys, see rung.config.key
    is_causal: ClassVar[bool] = True  # whether a prediction sees only what comes before it; false for masked models

    def __init__(self, cfg: Any, seed: int) -> None:
        self.cfg = cfg
        self.seed = seed

    def check_start(self, init_from: str) -> None:
        """Refuses, with a ConfigError, to begin with these weights where that contradicts what is to be learned."""

    def remarks(self) -> Sequence[str]:
        """What was decided for the user or is worth knowing before step 0, a line each; asked after `streams`."""
        return ()

    def unused(self) -> Mapping[str, str]:
        """Keys that mean nothing in this run, with the reason: told where somebody has set one."""
        return {}

    def streams(self) -> Mapping[str, Stream]:
        """`train`, and any number of eval sets in the order in which they matter; the first one chooses the best."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """The model with initial weights, in float32. The engine has seeded torch."""
        raise NotImplementedError

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        """The first one's loss is the loss of the run, in training and in eval."""
        raise NotImplementedError

    def measure(self, model: nn.Module, batch: Batch, draw: Draw) -> Mapping[str, Part]:
        """Further metrics of the field on an eval batch, as sums and counts. An eval draws at step -1, always."""
        return {}

    def held_out(self, split: str) -> Mapping[str, Stream]:
        """Eval sets of a split that training never looks at, `test` above all; for `rung eval --split`."""
        raise UserError(f"{type(self).__name__} has no split {split!r} to evaluate on")

    def target_losses(self, model: nn.Module, batch: Batch, draw: Draw) -> tuple[Tensor, Tensor]:
        """The loss of each target and its weight, both (rows, positions): the terms of the one loss, not yet summed."""
        raise UserError(f"{type(self).__name__} does not tell the loss of single targets")

    def foreign(self, folder: Path) -> nn.Module:
        """A model that others have trained, from a Hugging Face folder, as `target_losses` and the loss take it."""
        raise UserError(f"{type(self).__name__} cannot use the model in {folder}")

    @classmethod
    def keys_of(cls, source: Path) -> Mapping[str, Any]:
        """The keys that a model must have to take the weights of others, as a tree: {"model": {"n_layer": 12}}.

        `source` is a Hugging Face folder or a file, as init_from names it. Keys that the user sets win.
        """
        return {}

    def adopt(self, model: nn.Module, source: Path) -> str:
        """Fills the model with weights that others have trained, and returns what a person should know of it."""
        raise UserError(
            f"{type(self).__name__} cannot begin with the weights in {source}; set init_from to a run, a checkpoint or "
            "scratch"
        )

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        """Artifacts a person wants to see or hear. Must change nothing; the model is in eval mode, no gradients."""
        return ()

    def player(self, model: nn.Module) -> Player:
        """What `rung play` walks in."""
        raise UserError(f"{type(self).__name__} makes nothing to walk in; `rung sample` makes what it can")

    def export(self, model: nn.Module) -> Exported:
        """What `rung export --onnx` writes."""
        raise UserError(f"{type(self).__name__} does not say how to export its model")

    def export_hf(self, model: nn.Module, folder: Path) -> Sequence[str]:
        """Writes what `rung export --hf` is to write into an empty folder; returns the names of the files."""
        raise UserError(f"{type(self).__name__} does not say how its model is a Hugging Face folder")

    def inputs(self) -> Sequence[Input]:
        """What can be taken away from the model, to see whether it was used."""
        return ()

    def definition(self) -> Mapping[str, Any]:
        """What the loss and the metrics count: which loss, mask, ignored ids; plain values.

        Two runs whose definitions differ get no verdict, whatever their figures are. The engine adds the eval set and
        how sums are divided.
        """
        return {}

    def identity(self) -> Mapping[str, Any]:
        """What a checkpoint's weights mean: vocabulary, tokenizer, normalisation. Must be equal to load one."""
        return {}

    @classmethod
    def prepare(
        cls, cfg: Any, seed: int, source: Path | None, name: str | None, replace: bool, report: Report
    ) -> tuple[Path, str]:
        """Writes the store that `streams` reads, from `source` or the embedded default; returns where, and a summary.

        `name` is where to put it when the config's own place is not wanted; `report(what, done, total)` shows progress.
        """
        raise UserError(f"{cls.__name__} has no data to prepare: its streams make their own")

    @classmethod
    def survey(cls, cfg: Any, path: Path, out: Path, report: Report) -> str:
        """Looks at a prepared store before anything is trained on it: pages and pictures in `out`, and a summary."""
        raise UserError(f"{cls.__name__} has no report on its data; `rung data show {path.name}` describes it")

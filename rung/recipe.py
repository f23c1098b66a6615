"""All that the engine knows of a recipe.

A recipe says what is learned: the streams of data, the model, the loss, the samples worth looking at. A loss is never a
mean: it is a sum and a count of targets, so that the engine can divide once, by the count of the whole step, and the
result does not depend on how a batch is cut into micros or ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from rung.errors import UserError
from rung.random import Draw

if TYPE_CHECKING:  # torch takes seconds to import, and many verbs only want a recipe's Config
    import msgspec
    from torch import Tensor, nn

    from rung.data.store import Store

Arrays = dict[str, np.ndarray]  # a batch as a stream gathers it: one row per id, on the first axis
Batch = dict[str, "Tensor"]  # the same on the device, as a loss sees it
Part = tuple["Tensor", "Tensor"]  # a sum and its count
Report = Callable[[str, int, int], None]  # what is being done, how much of it is, how much there is


class TargetLosses(NamedTuple):
    """The terms of a loss before they are summed: the loss of each target and its weight, of one shape, rows first.

    (rows, positions), or further axes where a position has several targets, such as (rows, positions, codebooks);
    `names` says what the last axis counts.
    """

    losses: Tensor
    weights: Tensor
    names: Sequence[str] = ()


class Loss(NamedTuple):
    """A summed loss over `count` targets, with named parts (per codebook, per task, per class of token).

    The names of the parts must be the same for every batch; a part without targets has the count 0. `targets` are the
    same terms one by one, for `rung eval --split`: by position, by group of rows, with standard errors.
    """

    sum: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody wants here
    parts: Mapping[str, Part] = {}
    targets: TargetLosses | None = None


class ParameterGroup(NamedTuple):
    """Parameters that are updated alike. What is None comes from the config.

    The config's weight decay is for tensors of two or more dimensions; a number here is for every tensor of the group.
    Nothing else depends on groups: gradients are clipped and updates skipped for a whole objective.
    """

    name: str
    parameters: Iterable[nn.Parameter]
    lr_scale: float = 1.0  # times the learning rate of the step
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    muon: bool = False  # with optimizer.name=muon its matrices are Muon's, which has neither betas nor eps


class Compile(NamedTuple):
    """What `system.compile=true` compiles of an objective; evals and samples run as written.

    `modules` in place of the whole loss, where the loss draws random numbers, loops, or is differentiated twice; an
    empty list compiles nothing. `dynamic` is torch's: False compiles once for each shape, True once for all, None
    begins with the first shape and gives up on it at the second.
    """

    modules: Sequence[nn.Module] | None = None
    dynamic: bool | None = False


WHOLE_STATIC = Compile()
WHOLE_DYNAMIC = Compile(dynamic=True)


class Objective(NamedTuple):
    """What is minimised in one backward. A GAN has two, both differentiated at the weights before the step."""

    name: str
    groups: Sequence[ParameterGroup]
    loss: Callable[[Batch, Draw], Loss]
    every: int = 1
    compile: Compile = WHOLE_STATIC
    blocks: Sequence[nn.Module] = ()  # of which `system.activation_checkpointing` keeps only what went in

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.groups for parameter in group.parameters]


class Sample(NamedTuple):
    """One artifact: a file name with its suffix, its bytes, and what a reader should know of it."""

    name: str
    data: bytes
    caption: str = ""

    def __repr__(self) -> str:
        return f"<Sample {self.name}, {len(self.data)} bytes{': ' + self.caption if self.caption else ''}>"

    def _repr_html_(self) -> str:
        from rung.report.blocks import File
        from rung.report.html import fragment

        return fragment(File(self.name, self.caption, self.data))


class Input(NamedTuple):
    """Something the model is given and could ignore; `how` says how to take it away: permute, zero or shift."""

    name: str
    tensors: Sequence[str]
    how: str = "permute"


class Identity(NamedTuple):
    """What the numbers of a run mean, as plain text, numbers and lists.

    `weights`: vocabulary, tokenizer, normalisation; a checkpoint loads only where they are equal. `metrics`: which
    loss, mask, ignored ids; two runs that differ here get no verdict, whatever their figures are. `parts` says the same
    of single parts of the loss and measures, in place of `metrics`: what a mask leaves alone stays comparable. The
    engine adds the eval set and how sums are divided.
    """

    weights: Mapping[str, Any] = {}
    metrics: Mapping[str, Any] = {}
    parts: Mapping[str, Mapping[str, Any]] = {}


class Notes(NamedTuple):
    """What a user should know before step 0."""

    errors: Sequence[str] = ()  # why this cannot be trained; each says what to change
    lines: Sequence[str] = ()  # what was decided for the user, for the header of the run
    unused: Mapping[str, str] = {}  # keys that mean nothing in this run, with the reason: reported where one is set


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
    """A trained model that a visitor of `rung play` can try. It knows nothing of pages; `kind` names the one it needs.

    The kinds are text, piano, music, speech and world. All but world answer requests.
    """

    kind: str

    def about(self) -> dict[str, Any]:
        """Plain data for the page: what can be asked for, within which limits, and what is usual."""


class Answers(Player, Protocol):
    """A player that takes a request and answers it piece by piece."""

    @property
    def Request(self) -> type[msgspec.Struct]:
        """What can be asked; JSON from a visitor is decoded into it."""

    def answer(self, request: Any) -> Iterator[dict[str, Any]]:
        """The pieces of an answer, plain data; bytes are sent as base64. What cannot be answered is a UserError.

        Answers of several visitors may be made in turns, one piece of each, all in one thread; they share the weights
        and nothing else. A visitor who leaves closes the iterator.
        """


class Walkable(Player, Protocol):
    """A learned world, kind "world". It serves any number of walks, which share nothing but the weights.

    about() gives height, width, rate_hz; controls (a list of name, low, high, is_constant); intents (names that `step`
    understands: forward, right, turn, look, or fewer); places (a list of label, length: where a walk can begin, and
    how many recorded steps follow); if it likes, start (the place and offset of a visitor who asks for none).
    """

    def walk(self, place: int, offset: int = 0) -> Walk:
        """A new walk, `offset` recorded steps after the beginning of a place."""


class Exported(NamedTuple):
    """A module to be written in a form that other programs can run, with an example of what it takes."""

    module: nn.Module
    inputs: Mapping[str, Tensor]  # by name, in the order of the module's arguments; the first axis is the batch
    outputs: Sequence[str]
    notes: Mapping[str, str] = {}  # what each input and output means


class Stream:
    """One data set, addressed by position.

    A position counts rows since the start of training, not batches: a run resumed with another batch size continues
    with the next row. `ids` must be a pure function of its arguments; `gather` of its own.
    """

    fingerprint: str  # what the data is, to the byte, and how rows are made of it
    num_rows: int  # rows in one epoch
    targets_per_row: float = 1.0  # targets in a row, on average over the epoch; turns budgets in tokens into steps
    baselines: Mapping[str, float] = {}  # losses of trivial models on this very set, to print beside ours
    about: Mapping[str, Any] = {}  # source, split, tokenizer, ...: what a person calls the parts of the fingerprint
    gathers_in: ClassVar[Literal["thread", "process"]] = "thread"  # process: decoding is Python's work; needs pickle
    taken_away: Sequence[str] = ()  # arrays of this set that are zero on purpose, to see what they are worth
    groups: Sequence[str] = ()  # what rows are told apart by: components of a mixture, composers, maps
    stores: Sequence[Store] = ()  # prepared data that rows are read from; hashed while training begins

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
    """What to subclass. `Config`, `streams`, `model` and `objectives` are required; the rest has a sensible default."""

    Config: ClassVar[type[Any]]  # a dataclass of the recipe's own keys, see rung.config.key

    def __init__(self, cfg: Any, seed: int) -> None:
        self.cfg = cfg
        self.seed = seed

    def streams(self, split: str | None = None) -> Mapping[str, Stream]:
        """`train`, and any number of eval sets in the order in which they matter; the first one chooses the best.

        With a `split`, the eval sets of data that training never looks at, `test` above all, for `rung eval --split`. A
        recipe without such data leaves the argument out.
        """
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

    def sample(self, model: nn.Module, draw: Draw) -> Sequence[Sample]:
        """Artifacts a person wants to see or hear. Must change nothing; the model is in eval mode, no gradients."""
        return ()

    is_causal: ClassVar[bool] = True  # whether a prediction sees only what comes before it; false for masked models

    def inputs(self) -> Sequence[Input]:
        """What can be taken away from the model, to see whether it was used."""
        return ()

    def identity(self) -> Identity:
        """What the weights and the metrics mean."""
        return Identity()

    def describe(self, init_from: str) -> Notes:
        """Errors before the start, lines for the header, keys without effect; asked after `streams`.

        `init_from` is where the weights come from, for what would contradict it.
        """
        return Notes()


# Optional capabilities: inherit those the recipe has, and the verb works for it.


class Prepares:
    """`rung data RECIPE`: data that is made beforehand."""

    @classmethod
    def prepare(
        cls,
        cfg: Any,
        seed: int,
        source: Path | None,
        name: str | None,
        replace: bool,
        report: Report,
        device: str = "auto",
    ) -> tuple[Path, str]:
        """Writes the store that `streams` reads, from `source` or the embedded default; returns where, and a summary.

        `name` is where to put it when the config's own place is not wanted; `report(what, done, total)` shows progress.
        `device` is for data that a model encodes: auto (a GPU if there is one), cpu, cuda:1.
        """
        raise NotImplementedError


class Reports:
    """`rung data RECIPE --report`: a look at prepared data before anything is trained on it."""

    @classmethod
    def survey(cls, cfg: Any, path: Path, out: Path, report: Report) -> str:
        """Writes pages and pictures into `out`, and returns a summary."""
        raise NotImplementedError


class Pretrained:
    """`init_from=FOLDER`: weights that others have trained."""

    @classmethod
    def config_from_pretrained(cls, source: Path) -> Mapping[str, Any]:
        """The keys that a model must have to take external weights, as a tree: {"model": {"n_layer": 12}}.

        `source` is a Hugging Face folder or a file, as init_from names it. Keys that the user sets win.
        """
        return {}

    def load_pretrained(self, model: nn.Module, source: Path) -> str:
        """Fills the model with weights that others have trained, and returns what a person should know of it."""
        raise NotImplementedError

    def load_external(self, folder: Path) -> nn.Module:
        """An external model as `objectives` takes it, from a Hugging Face folder, for `rung eval --weights`."""
        raise UserError(
            f"the recipe {type(self).__name__} cannot evaluate the model in {folder}: it has no load_external(); "
            "leave --weights out to evaluate the run itself",
            code="not-supported",
        )


class Exports:
    """`rung export`: the model for other programs; one of the two will do."""

    def export(self, model: nn.Module) -> Exported:
        """What `rung export --onnx` writes."""
        raise UserError(f"{type(self).__name__} cannot be exported as ONNX", code="not-supported")

    def export_hf(self, model: nn.Module, folder: Path) -> Sequence[str]:
        """Writes what `rung export --hf` is to write into an empty folder; returns the names of the files."""
        raise UserError(f"{type(self).__name__} cannot be exported as a Hugging Face folder", code="not-supported")


class Plays:
    """`rung play`: a model that can be tried in the browser."""

    def player(self, model: nn.Module) -> Answers | Walkable:
        """Called once, in the thread that will answer; the model is in eval mode, without gradients."""
        raise NotImplementedError


def has_splits(recipe_class: type[Recipe]) -> bool:
    """Whether it has eval sets of other splits than that of training."""
    return "split" in inspect.signature(recipe_class.streams).parameters

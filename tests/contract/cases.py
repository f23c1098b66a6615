"""Every recipe of the catalog, small enough for a test, and a toy unlike any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rung.config import Layer, parse_overrides
from rung.engine.build import Setup, build
from rung.recipe import Recipe
from rung.resolve import schema_of
from tests.contract.newcomer import Newcomer
from tests.contract.toy import Toy

SMALL = [
    "system.device=cpu",
    "system.dtype=float32",
    "data.batch_size=8",
    "optimizer.max_iters=12",
    "lr.warmup_iters=2",
    "eval_interval=5",
    "checkpoint.every=4",
    "checkpoint.keep=0",
    "lr.learning_rate=1e-3",
]


@dataclass(frozen=True)
class Case:
    name: str
    recipe_class: type[Recipe]
    words: tuple[str, ...]
    overfit: tuple[str, ...] = ()
    overfit_below: float = 0.0  # the loss that eight memorised rows must reach
    calm: tuple[str, ...] = ()  # what switches dropout off, whose mask is drawn per micro
    deeper: tuple[tuple[str, ...], tuple[str, ...]] | None = None  # two models, the second with parts more
    knows_rules: bool = False  # whether the loss leaves out what cannot come next, so that a guess is among fewer
    even_rows: bool = False  # whether every training row has as many targets as every other

    def setup(self, *more: str, root: Path = Path("runs")) -> Setup:
        return build(self.config(*more), self.recipe_class, root)

    def config(self, *more: str) -> Any:
        merged = {word.partition("=")[0]: word for word in (*SMALL, *self.words, *more)}
        layer = Layer("command line", parse_overrides(merged.values()))
        return schema_of(self.name, self.recipe_class).resolve([layer])


def piano(data: Path) -> Case:
    from rung.recipes.piano.recipe import Piano

    words = (
        f"dataset.base_dataset_name={data} model.n_layer=2 model.n_head=2 model.n_embd=32 data.context_size=48 "
        "sampling.num_tokens=40 model.dropout=0.1"
    )
    return Case(
        "piano", Piano, tuple(words.split()), ("lr.learning_rate=1e-2", "model.dropout=0"), 0.5, ("model.dropout=0",),
        # (the other schemes divide by the number of layers)
        (("model.init=xavier",), ("model.init=xavier", "model.n_layer=3")),
    )  # fmt: skip


def piano_keys(data: Path) -> Case:
    """What the presets switch on."""
    case = piano(data)
    more = (
        "model.positions=rotary model.sounding_keys=true loss_grammar=true data.end_token=true data.moving_cuts=true "
        "dataset.augmentation.max_pitch_shift=2 dataset.augmentation.speed_change_factors=[1.1]"
    )
    calm = ("dataset.augmentation.max_pitch_shift=0", "dataset.augmentation.speed_change_factors=[]",
            "data.moving_cuts=false")  # fmt: skip
    return Case("piano", case.recipe_class, (*case.words, *more.split()), (*case.overfit, *calm), 0.5, case.calm,
                knows_rules=True)  # fmt: skip


def piano_task(data: Path) -> Case:
    from rung.recipes.piano.recipe import Piano

    # Rows that are cut, and some without any answer left; tasks, speeds and shifts are drawn.
    words = (
        f"dataset.base_dataset_name={data} model.n_layer=2 model.n_head=2 model.n_embd=32 model.dropout=0.1 "
        "stage=piano_task init_from=scratch loss_masking=finetuning data.context_size=48 data.notes_per_record=6 "
        "data.prefix_tokens=true dataset.augmentation.max_pitch_shift=2 "
        "dataset.augmentation.speed_change_factors=[1.1] sampling.num_tokens=40 model.sounding_keys=true "
        "loss_grammar=true"
    )
    overfit = ("lr.learning_rate=1e-2", "model.dropout=0", "tasks=[continuation]",
               "dataset.augmentation.max_pitch_shift=0", "dataset.augmentation.speed_change_factors=[]")  # fmt: skip
    return Case("piano", Piano, tuple(words.split()), overfit, 0.5, ("model.dropout=0",), knows_rules=True)


def text(data: Path) -> Case:
    from rung.recipes.text.recipe import Text

    # Tiles, so that rows of the eval set count unequally; those of training cannot.
    words = (
        f"dataset.base_dataset_name={data} model.n_layer=2 model.n_head=2 model.n_embd=32 model.rotary_fraction=0.5 "
        "model.dropout=0.1 data.context_size=48 data.eval_windows=0 sampling.num_tokens=20"
    )
    return Case(
        "text", Text, tuple(words.split()), ("lr.learning_rate=1e-2", "model.dropout=0"), 0.5, ("model.dropout=0",),
        (("model.init=xavier",), ("model.init=xavier", "model.n_layer=3")), even_rows=True,
    )  # fmt: skip


def music(data: Path) -> Case:
    from rung.recipes.music.recipe import Music

    # Stretches from anywhere, some of them the end of a piece; texts are dropped, shuffled and cut.
    words = (
        f"dataset.base_dataset_name={data} model.n_layer=2 model.n_head=2 model.n_kv_head=1 model.n_embd=32 "
        "model.text.n_layer=1 model.text.n_head=2 model.text.n_embd=16 model.dropout=0.1 model.text_lr_scale=0.5 "
        "data.context_size=60 data.text_length=20 data.codebooks=2 data.unconditional_frac=0.3 data.tag_shuffle=true "
        "data.tag_dropout=0.2 data.tag_limit=2 delay.pattern=[0,2] loss_masking=codes_eos channel_weights=[1,0.5] "
        "sampling.seconds=0.2"
    )
    overfit = ("lr.learning_rate=1e-2", "model.dropout=0", "model.text_lr_scale=1")
    return Case(
        "music", Music, tuple(words.split()), overfit, 0.5, ("model.dropout=0",),
        (("model.init=xavier",), ("model.init=xavier", "model.n_layer=3")),
    )  # fmt: skip


def speech(data: Path) -> Case:
    from rung.recipes.speech.recipe import Speech
    from tests.recipes.speech.stores import PROMPTS
    from tests.recipes.speech.stores import SMALL as small

    # Utterances of unequal length by two tasks, prompts drawn among several; a language model that is trained along.
    words = (*small, f"dataset.base_dataset_name={data}", PROMPTS, 'template="{}"', "model.qformer_lr_scale=0.5")
    overfit = ("lr.learning_rate=1e-2", "model.dropout=0", "model.qformer_lr_scale=1")
    return Case("speech", Speech, words, overfit, 0.5, ("model.dropout=0",))


def speech_frozen(data: Path) -> Case:
    """The encoder runs at every step, and only the bridge and LoRA are trained."""
    case = speech(data)
    shared = [word for word in case.words if not word.startswith("model.lm.")]
    words = (*shared, "model.lm.name=folder", f"model.lm.path={data.parent / 'lm'}", "data.cached=false",
             "model.lora.rank=4", "model.lora.lr_scale=2")  # fmt: skip
    calm = ("model.dropout=0", "model.lora.dropout=0")
    return Case("speech", case.recipe_class, words, (*case.overfit, "model.lora.dropout=0"), 1.5, calm)


def world(data: Path) -> Case:
    from rung.recipes.world.recipe import World

    # Rollouts of 2 to 4 frames from the first step on, and episodes that end inside them: rows count unequally.
    words = (
        f"dataset.base_dataset_name={data} model.memory=[2@16x12,4@8x6] model.width=8 model.depth=1 "
        "model.discriminator_width=4 stage=closed_loop closed_loop.start=2 closed_loop.steps=3 closed_loop.rise=8 "
        "closed_loop.share=1 adversarial.weight=0.1 adversarial.r1_every=2 adversarial.every=2 context.noise=0.1 "
        "evaluation.horizon=4 evaluation.num_rollouts=7 sampling.num_frames=3 sampling.num_rows=2"
    )
    overfit = ("lr.learning_rate=1e-2", "adversarial.weight=0", "context.noise=0", "stage=open_loop")
    return Case("world", World, tuple(words.split()), overfit, 0.04, deeper=((), ("model.depth=2",)))


def toy(data: Path) -> Case:
    return Case(
        "toy", Toy, (), ("lr.learning_rate=3e-2", "model.adversarial=0", "model.width=32"), 0.35, ("model.dropout=0",)
    )


def newcomer(data: Path) -> Case:
    return Case("newcomer", Newcomer, (), ("lr.learning_rate=3e-2",), 0.35)


# One line per recipe of the catalog; test_catalog fails when one is missing. The fixture makes its data.
CASES: dict[str, tuple[Callable[[Path], Case], str]] = {
    "piano": (piano, "piano_data"),
    "piano_keys": (piano_keys, "piano_data"),
    "piano_task": (piano_task, "piano_data"),
    "text": (text, "text_data"),
    "music": (music, "music_data"),
    "speech": (speech, "speech_data"),
    "speech_frozen": (speech_frozen, "speech_data"),
    "world": (world, "world_data"),
    "toy": (toy, "tmp_path"),
    "newcomer": (newcomer, "tmp_path"),
}

"""`rung export --hf`: a folder of a recipe's model as Hugging Face has them, whole or not there.

The recipe writes the files, beside the final place; `transformers`, where it is installed, opens what was written and
must make the same logits; the folder is moved last. An earlier folder stays as it was until that moment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.data.store import swap
from rung.errors import CheckpointError, UserError
from rung.files import sync

if TYPE_CHECKING:
    from torch import nn

    from rung.engine.build import Setup

MARK = "config.json"  # a folder with one is a model, and may be replaced by another
MOST_POSITIONS = 128  # of the made-up rows
TOLERANCE = 1e-2  # of logits; what is written wrongly differs by more than that


@dataclass(frozen=True)
class Written:
    path: str
    files: Mapping[str, int]  # name -> bytes
    largest_difference: float | None  # between our logits and those of transformers; None where it is not installed

    def tell(self, as_json: bool) -> None:
        if as_json:
            click.echo(json.dumps(asdict(self), indent=1))
            return
        click.echo(f"{self.path}  {sum(self.files.values()) / 1e6:.1f} MB")
        for name, size in self.files.items():
            click.echo(f"  {name}  {size} bytes")
        worst = self.largest_difference
        click.echo(
            "not checked: transformers is not installed (pip install 'rung[llm]')"
            if worst is None
            else f"transformers opens it; its logits differ by at most {worst:.2g}"
        )


def check_place(out: Path, replace: bool) -> None:
    """Refuses to write where something else is."""
    if Path.cwd().is_relative_to(os.path.realpath(out)):
        raise UserError(f"{out} is the folder you are in, or holds it; name one that can be moved with --out")
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or out.is_symlink() or not (out / MARK).is_file():
        raise UserError(f"{out} is there and is no folder of a model; choose another place with --out")
    if not replace:
        raise UserError(f"{out} is there already; add --replace to write it anew, or choose another place with --out")


def write_folder(setup: Setup, out: Path, replace: bool) -> Written:
    """The run's model as a folder at `out`; nothing is left where that fails."""
    check_place(out, replace)
    beside, has_parent = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.part"), out.parent.exists()
    try:
        beside.mkdir(parents=True)
        try:
            names = setup.recipe.export_hf(setup.state.model, beside)
            worst = largest_difference(setup.state.model, beside)
            for name in names:
                sync(beside / name)
            swap(beside, out)
            sync(out.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            if not has_parent:
                with contextlib.suppress(OSError):  # it is not empty where all went well
                    out.parent.rmdir()
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}; choose another place with --out") from error
    except Exception as error:
        if "os error" in str(error).lower():  # safetensors only quotes what the disk said
            raise UserError(f"cannot write {out}: {error}; choose another place with --out") from error
        raise
    return Written(str(out), {name: (out / name).stat().st_size for name in names}, worst)


def largest_difference(model: nn.Module, folder: Path) -> float | None:
    """Between our logits and those of the folder, on made-up ids; an error where it is more than rounding."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
    )
    if wrong := [*info["missing_keys"], *info["unexpected_keys"]]:
        raise CheckpointError(f"transformers does not find its way in what was written: {sorted(wrong)[0]}")
    config = theirs.config
    num_positions = min(MOST_POSITIONS, config.max_position_embeddings)
    ids = torch.randint(0, config.vocab_size, (2, num_positions), generator=torch.Generator().manual_seed(0))
    is_training = model.training
    try:
        with torch.no_grad():
            worst = float((model.eval()(ids) - theirs.eval()(ids).logits).abs().max())
    finally:
        model.train(is_training)
    if not worst <= TOLERANCE:
        raise CheckpointError(f"transformers makes other logits of what was written: they differ by {worst:g}")
    return worst

"""`rung export`: a run's model as ONNX or as a Hugging Face folder, checked against what it computes here.

A Hugging Face folder is whole or not there: the recipe writes the files beside the final place, `transformers` opens
them and must give the same logits, and the folder is moved last. An earlier folder stays until that moment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.cli.options import json_option, runs_option, trust_option
from rung.errors import CheckpointError, UserError
from rung.files import sync, write_whole
from rung.recipe import Exports
from rung.text import echo, echo_json

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rung.recipe import Exported

OPSET = 20  # of ONNX: the first with a grid_sample that every runtime of the last years has
MARK = "config.json"  # a folder with one is a model, and may be replaced by another
MOST_POSITIONS = 128  # of the made-up rows
TOLERANCE = 1e-2  # of logits; what is written wrongly differs by more than that


@click.command(short_help="Write a run's model for other programs.")
@click.argument("run")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--onnx", "is_onnx", is_flag=True, help="As ONNX, for onnxruntime, browsers and phones.")
@click.option("--hf", "is_hf", is_flag=True, help="As a Hugging Face folder, which transformers opens.")
@click.option("--at", type=int, help="The save to export; default: the best one, else the last.")
@click.option("--out", type=click.Path(path_type=Path),
              help="The file or folder; default: ./exports/RUN-STEP.onnx, or ./exports/RUN-STEP.")  # fmt: skip
@click.option("--replace", is_flag=True, help="Overwrite the folder of an earlier export.")
@json_option
@trust_option
@runs_option
def command(
    run: str, overrides: tuple[str, ...], is_onnx: bool, is_hf: bool, at: int | None, out: Path | None, replace: bool,
    as_json: bool, root: Path,
) -> None:  # fmt: skip
    """Write the weights of RUN in a form that runs without rung, and check that it computes the same.

    \b
    Examples:
      rung export world/3 --onnx
      rung export world/3 --onnx --at 2000 --out walk.onnx
      rung export piano/7 --hf
      rung export text/3 --hf --out my-gpt --replace
    """
    if is_onnx == is_hf:
        message = "choose one form to export: --onnx (one file) or --hf (a Hugging Face folder)"
        raise UserError(message, code="missing-option")
    missing = [name for name in ("onnx", "onnxscript") if is_onnx and importlib.util.find_spec(name) is None]
    if missing:
        message = f"rung export --onnx needs {missing[0]}, which is not installed: pip install 'rung[onnx]'"
        raise UserError(message, code="not-installed")
    from rung import api

    if is_hf and out is not None:
        _check_place(out, replace)  # before weights are read, which may take minutes
    loaded = api.load(run, ("system.device=cpu", *overrides), at=at, runs=root)
    recipe, model, name = loaded.setup.recipe, loaded.setup.state.model, f"{loaded.run.id} at step {loaded.step}"
    if not isinstance(recipe, Exports):
        form = "ONNX" if is_onnx else "a Hugging Face folder"
        raise UserError(f"{type(recipe).__name__} cannot be exported as {form}", code="not-supported")
    out = out or Path("exports") / f"{loaded.run.id.replace('/', '-')}-{loaded.step}{'.onnx' if is_onnx else ''}"
    if is_onnx:
        _export_onnx(recipe.export(model), out, name, as_json)
    else:
        _export_hf(recipe, model, out, replace, as_json)


def _export_onnx(exported: Exported, out: Path, description: str, as_json: bool) -> None:
    if out.is_dir():
        message = f"{out} is a folder, and --onnx writes one file; choose another path with --out"
        raise UserError(message, code="bad-path")
    data = to_onnx(exported, description)
    worst = check(exported, data)
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, data)
    row = {"path": str(out), "bytes": len(data), "inputs": {k: list(v.shape) for k, v in exported.inputs.items()},
           "notes": dict(exported.notes), "largest_difference": worst}  # fmt: skip
    if as_json:
        echo_json(json.dumps(row, indent=1))
        return
    echo(f"{out}  {len(data) / 1e6:.1f} MB; the first axis of every input is the batch")
    for tensor, value in exported.inputs.items():
        kind = f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        echo(f"  in   {tensor} {kind}  {exported.notes.get(tensor, '')}")
    for tensor in exported.outputs:
        echo(f"  out  {tensor}  {exported.notes.get(tensor, '')}")
    unchecked = "not checked: onnxruntime is not installed"
    echo(unchecked if worst is None else f"onnxruntime differs by at most {worst:g}")


def to_onnx(exported: Exported, description: str) -> bytes:
    """The module as the bytes of one ONNX file, with the weights inside and the size of the batch free."""
    import onnx
    import torch

    class Flat(torch.nn.Module):  # one flat list of inputs, whatever the signature of the module looks like
        def __init__(self) -> None:
            super().__init__()
            self.module = exported.module

        def forward(self, *inputs: Tensor) -> Tensor:
            made: Tensor = self.module(*inputs)
            return made

    batch = torch.export.Dim("batch", min=1, max=1024)
    doubled = tuple(torch.cat([value, value]) for value in exported.inputs.values())  # 1 would be taken as fixed
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # the exporter prints every step
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Flat().eval(),
            doubled,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(exported.inputs),
            output_names=list(exported.outputs),
            dynamic_shapes={"inputs": tuple({0: batch} for _ in doubled)},
        )
    assert program is not None
    model = program.model_proto
    model.doc_string = "\n".join([description, *(f"{name}: {note}" for name, note in exported.notes.items())])
    onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data


def check(exported: Exported, data: bytes) -> float | None:
    """The largest difference between the file's answers and the module's, on made-up inputs; None without a runtime."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for name, like in exported.inputs.items():
        if like.is_floating_point():
            inputs[name] = torch.rand(like.shape, generator=generator, dtype=like.dtype)
        else:
            inputs[name] = torch.randint(0, 256, like.shape, generator=generator, dtype=like.dtype)
    with torch.no_grad():
        answer = exported.module(*inputs.values())
    ours = answer if isinstance(answer, tuple) else (answer,)
    theirs = session.run(list(exported.outputs), {name: value.numpy() for name, value in inputs.items()})
    pairs = zip(ours, map(torch.from_numpy, theirs), strict=True)
    return max(float((one.double() - other.double()).abs().max()) for one, other in pairs)


def _check_place(out: Path, replace: bool) -> None:
    """Refuses to write where something else is."""
    if Path.cwd().is_relative_to(os.path.realpath(out)):
        message = f"{out} is the folder you are in, or holds it; name one that can be moved with --out"
        raise UserError(message, code="bad-path")
    if not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or out.is_symlink() or not (out / MARK).is_file():
        message = f"{out} exists and is not a model folder; choose another path with --out"
        raise UserError(message, code="file-exists")
    if not replace:
        message = f"{out} already exists; add --replace to overwrite it, or choose another path with --out"
        raise UserError(message, code="file-exists")


def _export_hf(recipe: Exports, model: nn.Module, out: Path, replace: bool, as_json: bool) -> None:
    """Writes the model as a folder at `out`; nothing is left where that fails."""
    from rung.data.store import swap

    _check_place(out, replace)
    beside, has_parent = out.with_name(f".{out.name}.{uuid.uuid4().hex[:12]}.part"), out.parent.exists()
    with _writing(out):
        beside.mkdir(parents=True)
        try:
            names = recipe.export_hf(model, beside)
            worst = largest_difference(model, beside)
            for name in names:
                sync(beside / name)
            swap(beside, out)
            sync(out.parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            if not has_parent:
                with contextlib.suppress(OSError):  # it is not empty where all went well
                    out.parent.rmdir()
    sizes = {name: (out / name).stat().st_size for name in names}
    if as_json:
        echo_json(json.dumps({"path": str(out), "files": sizes, "largest_difference": worst}, indent=1))
        return
    echo(f"{out}  {sum(sizes.values()) / 1e6:.1f} MB")
    for name, num_bytes in sizes.items():
        echo(f"  {name}  {num_bytes} bytes")
    unchecked = "not checked: transformers is not installed (pip install 'rung[llm]')"
    echo(unchecked if worst is None else f"transformers opens it; its logits differ by at most {worst:.2g}")


def largest_difference(model: nn.Module, folder: Path) -> float | None:
    """Compares our logits with those of the folder, on made-up ids; more than rounding is an error."""
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
        message = f"transformers cannot load what was written: {sorted(wrong)[0]}"
        raise CheckpointError(message, code="export-mismatch")
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
        message = f"transformers computes different logits from what was written: they differ by {worst:g}"
        raise CheckpointError(message, code="export-mismatch")
    return worst


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turns what a disk refuses into one sentence."""
    try:
        yield
    except Exception as error:
        # safetensors only quotes what the disk said.
        if not isinstance(error, OSError) and "os error" not in str(error).lower():
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {out}: {reason}; choose another path with --out", code="cannot-write") from error

"""rung export"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rung.cli.resolve import json_option, runs_option
from rung.errors import UserError
from rung.files import write_whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rung.recipe import Exported

OPSET = 20  # of ONNX: the first with a grid_sample that every runtime of the last years has


@click.command(short_help="Write a run's model for other programs.")
@click.argument("run")
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--onnx", "is_onnx", is_flag=True, help="As ONNX, for onnxruntime, browsers and phones.")
@click.option("--hf", "is_hf", is_flag=True, help="As a Hugging Face folder, which transformers opens.")
@click.option("--at", type=int, help="The save to export; default: the best one, else the last.")
@click.option("--out", type=click.Path(path_type=Path),
              help="The file or folder; default: ./exports/RUN-STEP.onnx, or ./exports/RUN-STEP.")  # fmt: skip
@click.option("--replace", is_flag=True, help="Write a folder anew that an earlier export left there.")
@json_option
@runs_option
def command(
    run: str, words: tuple[str, ...], is_onnx: bool, is_hf: bool, at: int | None, out: Path | None, replace: bool,
    as_json: bool, runs_root: Path,
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
        raise UserError("say which form to export, and only one: --onnx (one file) or --hf (a Hugging Face folder)")
    missing = [name for name in ("onnx", "onnxscript") if is_onnx and importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"rung export --onnx needs {missing[0]}, which is not installed: pip install 'rung[onnx]'")
    from rung.cli.eval import open_weights
    from rung.cli.export_hf import check_place, write_folder
    from rung.runs.query import open_run

    name = open_run(run, runs_root).id
    if is_hf and out is not None:
        check_place(out, replace)  # before weights are read, which may take minutes
    setup, step = open_weights(run, ("system.device=cpu", *words), at, runs_root)
    if is_hf:
        out = out or Path("exports") / f"{name.replace('/', '-')}-{step}"
        write_folder(setup, out, replace).tell(as_json)
        return
    out = out or Path("exports") / f"{name.replace('/', '-')}-{step}.onnx"
    if out.is_dir():
        raise UserError(f"{out} is a folder, and --onnx writes one file; choose another place with --out")
    _write_onnx(setup.recipe.export(setup.state.model), out, f"{name} at step {step}", as_json)


def _write_onnx(exported: Exported, out: Path, description: str, as_json: bool) -> None:
    data = to_onnx(exported, description)
    worst = check(exported, data)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, data)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}; choose another place with --out") from error
    row = {"path": str(out), "bytes": len(data), "inputs": {k: list(v.shape) for k, v in exported.inputs.items()},
           "notes": dict(exported.notes), "largest_difference": worst}  # fmt: skip
    if as_json:
        click.echo(json.dumps(row, indent=1))
        return
    click.echo(f"{out}  {len(data) / 1e6:.1f} MB; the first axis of every input is the batch")
    for tensor, value in exported.inputs.items():
        click.echo(
            f"  in   {tensor} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}  {_note(exported, tensor)}"
        )
    for tensor in exported.outputs:
        click.echo(f"  out  {tensor}  {_note(exported, tensor)}")
    click.echo(
        "not checked: onnxruntime is not installed" if worst is None else f"onnxruntime differs by at most {worst:g}"
    )


def to_onnx(exported: Exported, description: str) -> bytes:
    """The module as the bytes of one ONNX file, with the weights inside and the size of the batch free."""
    import onnx
    import torch

    batch = torch.export.Dim("batch", min=1, max=1024)
    doubled = tuple(torch.cat([value, value]) for value in exported.inputs.values())  # 1 would be taken as fixed
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):  # the exporter tells its life
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            as_arguments(exported),
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


def as_arguments(exported: Exported) -> torch.nn.Module:
    """The module with one flat list of inputs, whatever its own signature looks like."""
    import torch

    class Flat(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = exported.module

        def forward(self, *inputs: Tensor) -> Tensor:
            made: Tensor = self.module(*inputs)
            return made

    return Flat().eval()


def check(exported: Exported, data: bytes) -> float | None:
    """The largest difference between the file's answer and the module's, on made-up inputs; None without a runtime."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    generator = torch.Generator().manual_seed(0)
    inputs = {name: _made_up(value, generator) for name, value in exported.inputs.items()}
    with torch.no_grad():
        ours = exported.module(*inputs.values())
    theirs = session.run(list(exported.outputs), {name: value.numpy() for name, value in inputs.items()})
    return float((ours.double() - torch.from_numpy(theirs[0]).double()).abs().max())


def _made_up(like: Tensor, generator: torch.Generator) -> Tensor:
    import torch

    if like.is_floating_point():
        return torch.rand(like.shape, generator=generator, dtype=like.dtype)
    return torch.randint(0, 256, like.shape, generator=generator, dtype=like.dtype)


def _note(exported: Exported, name: str) -> str:
    return exported.notes.get(name, "")

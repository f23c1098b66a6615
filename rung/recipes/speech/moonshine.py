"""The weights of Moonshine tiny's encoder, out of the pip package moonshine-voice.

The package has them as a model of onnxruntime whose matrices are 8-bit integers. They are read once with that library's
own classes, turned into the floats that they stand for, and kept in the cache folder: later uses need neither the
package nor onnxruntime. Weights are known by a digest of their values, so a damaged file is made anew.

onnxruntime itself rounds the activations to 8 bits as well, over all of a clip. Features computed with these floats
differ from its by 2.8 % (16 sentences of LJSpeech, mean cosine 0.9996), for lack of that rounding.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rung.data.wheel import Report, Wheel, cache_folder
from rung.errors import DataError, UserError
from rung.files import write_whole

if TYPE_CHECKING:
    import torch

# Pinned: later versions no longer have the model. Only read here, so any machine may have it, whatever its libraries.
MOONSHINE = Wheel(
    name="moonshine-voice",
    version="0.0.49",
    filename="moonshine_voice-0.0.49-py3-none-manylinux_2_34_x86_64.whl",
    sha256="03edc378e5236832421ccd382b267e43b95af8008137ad6643f5baf5ba31b579",
    platform="manylinux_2_34_x86_64",
)
MODEL = "moonshine_voice/assets/tiny-en/encoder_model.ort"
DIGEST = "b96d200a76b8dc9efbd991faecfb123fa8c831be7e42587996da65edc9294cb5"  # of read_weights
SETTINGS: dict[str, Any] = {  # of transformers' MoonshineConfig, those that the encoder reads
    "hidden_size": 288,
    "intermediate_size": 1152,
    "encoder_num_hidden_layers": 6,
    "encoder_num_attention_heads": 8,
    "encoder_hidden_act": "gelu",
    "attention_bias": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.9},
}


def load_weights(report: Report | None = None) -> dict[str, torch.Tensor]:
    """Weights by the names of transformers' MoonshineEncoder, float32; out of the cache, or read and put there."""
    from safetensors import SafetensorError
    from safetensors.numpy import save
    from safetensors.torch import load_file

    file = weights_file()
    if file.is_file():
        try:
            weights = load_file(file)
        except (SafetensorError, OSError):
            weights = {}
        if digest({name: tensor.numpy() for name, tensor in weights.items()}) == DIGEST:
            return weights
    read = read_weights(report)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, save(read))
    except OSError as error:
        problem = f"cannot keep Moonshine's weights under {file.parent}: {error.strerror or error}"
        raise DataError(f"{problem}; set RUNG_CACHE to a folder that can be written", code="cannot-write") from error
    return load_file(file)


def weights_file() -> Path:
    return cache_folder() / "models" / f"moonshine-tiny-en-{DIGEST[:12]}.safetensors"


def read_weights(report: Report | None = None) -> dict[str, np.ndarray]:
    """The weights as the package has them, in floats."""
    try:
        from onnxruntime.tools.ort_format_model.ort_flatbuffers_py.fbs.InferenceSession import InferenceSession
    except ImportError as error:
        problem = "reading Moonshine's weights for the first time needs the package onnxruntime"
        raise UserError(f"{problem}: `pip install 'rung[speech]'`", code="not-installed") from error
    MOONSHINE.fetch(report)
    graph = InferenceSession.GetRootAs(MOONSHINE.open(MODEL), 0).Model().Graph()

    values: dict[str, np.ndarray] = {}
    for tensor in map(graph.Initializers, range(graph.InitializersLength())):
        kind = {1: "<f4", 2: "u1"}.get(tensor.DataType())  # what else there is are shapes and indices
        if kind is not None:
            shape = [tensor.Dims(axis) for axis in range(tensor.DimsLength())]
            values[tensor.Name().decode()] = tensor.RawDataAsNumpy().view(kind).reshape(shape)
    # What kept its name through the export is a float of the network; the rest is found by the node that uses it.
    weights = {name.removesuffix("_add_tensor"): value for name, value in values.items() if name[0] != "/"}
    weights = {name: value for name, value in weights.items() if "::" not in name}
    for node in map(graph.Nodes, range(graph.NodesLength())):
        inputs = [node.Inputs(number).decode() for number in range(node.InputsLength())]
        module, _, operation = node.Name().decode()[1:].rpartition("/")
        if operation == "MatMul_quant":
            (stem,) = [name.removesuffix("_quantized") for name in inputs if name in values and "_quantized" in name]
            matrix = values[f"{stem}_quantized"].astype(np.float32) - values[f"{stem}_zero_point"].astype(np.float32)
            weights[f"{module.replace('/', '.')}.weight"] = (matrix * values[f"{stem}_scale"]).T
        elif module == "groupnorm" and operation in ("Mul", "Add"):
            weights[f"groupnorm.{'weight' if operation == 'Mul' else 'bias'}"] = values[inputs[1]].reshape(-1)
    weights = {name: np.ascontiguousarray(value, np.float32) for name, value in sorted(weights.items())}
    assert digest(weights) == DIGEST, "the wheel is pinned, so the reading has changed"
    return weights


def digest(weights: dict[str, np.ndarray]) -> str:
    """Of names, shapes and values, whatever the file format."""
    whole = hashlib.sha256()
    for name, value in sorted(weights.items()):
        whole.update(f"{name} {value.dtype} {value.shape}\n".encode())
        whole.update(np.ascontiguousarray(value).tobytes())
    return whole.hexdigest()

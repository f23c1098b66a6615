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
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
    def is_producer(self) -> bool:
        return not self.given and not self.error

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
    if not _is_of_reals(tensor) or tensor.numel() == 0:
        return True
    return bool(torch.isfinite(tensor.detach()).all())


def is_usable(tensor: Tensor) -> bool:
    """Finite, and so is its norm, as the engine asks of weights and moments: beyond 1e19 nothing goes well."""
    if not _is_of_reals(tensor) or tensor.numel() == 0:
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
        for name, tensor in batch.items():
            self._give(name, tensor, is_fill=False)
        for name, tensor in model.named_parameters():
            self._give(f"weight {name}", tensor, is_fill=is_mask(tensor))
        for name, tensor in model.named_buffers():  # a table of -inf is a mask
            self._give(f"buffer {name}", tensor, is_fill=not bool(torch.isnan(tensor).any()))

    def _give(self, name: str, tensor: Tensor, is_fill: bool) -> None:
        if not is_finite(tensor):
            self._found.append(Origin(given=name, is_fill=is_fill))
            self._origin[_storage(tensor)] = len(self._found) - 1

    def __enter__(self) -> _Watch:
        self._handles = hooked((module, self._entering(name), self._leaving()) for module, name in self._names.items())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda module, args: self._stack.append(name)

    def _leaving(self) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            name, error = self._stack.pop() if self._stack else "", sys.exc_info()[1]
            if error is not None and self._raised[0] is not error:  # the innermost module is left first
                self._raised = (error, name)

        return leave

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(_named_inputs(op, args, kwargs))
        if op._schema.is_mutable:  # what it was must still be known when it has become something else
            inputs = [(name, tensor, tensor.clone()) for name, tensor, _ in inputs]
        if not self.is_backward:
            self._modules_by_node.setdefault(torch.autograd._get_sequence_nr() - 1, self._module)
        try:
            outputs = op(*args, **kwargs)
        except Exception as error:
            self._found.append(self._describe(op, inputs, error=_said(error)))
            raise
        self._judge(op, args, kwargs, inputs, [t for t in _tensors(outputs) if _is_of_reals(t)])
        return outputs

    def _judge(self, op: Any, args: Any, kwargs: Any, inputs: list[_Input], outputs: list[Tensor]) -> None:
        bad = [tensor for tensor in outputs if not is_finite(tensor)]
        for tensor in outputs:
            if tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes():
                self._origin.pop(_storage(tensor), None) if _not_in(tensor, bad) else None
        if not bad:
            return
        known = [(self._origin[_storage(t)], name) for name, t, _ in inputs if _storage(t) in self._origin]
        serious = [(number, name) for number, name in known if not self._found[number].is_fill]
        has_nan = any(bool(torch.isnan(tensor).any()) for tensor in bad)
        if serious:
            number, argument = min(serious)
            self._consume(number, op, inputs, argument)
        elif known and not has_nan:
            number = min(known)[0]
        else:
            number = self._new(op, args, kwargs, inputs, has_nan)
            fill = self._found[min(known)[0]] if known else None
            self._found[number].filled = (fill.given or f"{fill.op} at {fill.line}") if fill is not None else ""
        for tensor in bad:
            self._origin[_storage(tensor)] = number

    def _new(self, op: Any, args: Any, kwargs: Any, inputs: list[_Input], has_nan: bool) -> int:
        """An operation that turned good into bad, or met something bad that nothing had made."""
        found = self._describe(op, inputs)
        odd = [x for x in _numbers([args, kwargs]) if not math.isfinite(x)]
        is_put = found.op not in ARITHMETIC and any(map(math.isnan, odd))
        found.is_fill = found.op in EMPTIES or bool(odd and (not has_nan or is_put))
        strangers = [(n, was) for n, t, was in inputs if _storage(t) not in self._origin and not is_finite(was)]
        if strangers and not found.is_fill:  # such as torch.tensor(float("nan")), which no operation computes
            found.argument, tensor = strangers[0]
            found.given = "a constant"
            found.is_fill = not has_nan and not bool(torch.isnan(tensor).any())
        self._found.append(found)
        return len(self._found) - 1

    def _consume(self, number: int, op: Any, inputs: list[_Input], argument: str) -> None:
        """The first operation that computed with what was bad from the start; views and casts only pass it on."""
        found = self._found[number]
        if found.given and not found.op and not op.is_view and _name(op) not in COPIES:
            met = self._describe(op, inputs)
            met.given, met.argument = found.given, argument
            self._found[number] = met

    def _describe(self, op: Any, inputs: list[_Input], error: str = "") -> Origin:
        found = Origin(_name(op), self._module, inputs=[range_of(name, was) for name, _, was in inputs], error=error)
        frames = _frames_here()
        node = torch._C._current_autograd_node() if self.is_backward else None
        if self.is_backward:
            found.phase = "recompute" if self._stack else "backward"
        if node is not None and not self._stack:
            found.node = node.name()
            found.module = self._modules_by_node.get(node._sequence_nr(), "")
            frames = _frames_in(_metadata(node).get("traceback_") or [])
        found.line, found.text = _users_line(frames)
        return found

    @property
    def _module(self) -> str:
        return self._stack[-1] if self._stack else ""

    def origin_of(self, bad: Sequence[Tensor]) -> Origin | None:
        """The first that reached one of these."""
        numbers = [self._origin[_storage(tensor)] for tensor in bad if _storage(tensor) in self._origin]
        serious = [number for number in numbers if not self._found[number].is_fill]
        return self._found[min(serious or numbers)] if numbers else None

    def raised(self, error: Exception) -> Origin:
        last = self._found[-1] if self._found else None
        if last is not None and last.error == _said(error):
            return last
        frames = [(f.f_code.co_filename, line) for f, line in _unwound(error)]
        line, text = _users_line(reversed(frames))
        module = self._raised[1] if self._raised[0] is error else ""
        return Origin(module=module, line=line, text=text, error=_said(error))


_Input = tuple[str, Tensor, Tensor]  # an argument's name, the tensor, and what it held before


def _named_inputs(op: Any, args: Any, kwargs: Any) -> Iterator[_Input]:
    names = [argument.name for argument in op._schema.arguments]
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        for tensor in _tensors(value):
            yield ("input" if name == "self" else name), tensor, tensor


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        yield from _numbers(list(value.values()))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _not_in(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return all(tensor is not other for other in others)


def _name(op: Any) -> str:
    return str(op).rpartition(".")[0]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _frames_here() -> Iterator[tuple[str, int]]:
    """Innermost first, as far as the forward goes: who asked for the search is beside the point."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not first_nonfinite.__code__:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]


def _frames_in(formatted: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Of a formatted stack, whose innermost frame comes last; as far as the forward goes."""
    for entry in reversed(formatted):
        match = _FRAME.search(entry)
        if match and (match[1], match[3]) == (first_nonfinite.__code__.co_filename, first_nonfinite.__name__):
            return
        if match:
            yield match[1], int(match[2])


def _metadata(node: Any) -> dict[str, Any]:
    found: dict[str, Any] = node.metadata  # which torch's types take for a method
    return found


def _unwound(error: BaseException) -> Iterator[tuple[Any, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _users_line(frames: Iterable[tuple[str, int]]) -> tuple[str, str]:
    """The innermost line of a model's own code, as file:line and its text."""
    for file, number in frames:
        if not file.startswith(("<", *_NOT_THE_USERS)):
            return f"{_near(file)}:{number}", linecache.getline(file, number).strip()
    return "", ""


def _near(file: str) -> str:
    """As a person in this folder would type it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file

"""Watches one eager forward from outside: what went into tables of embeddings, attention and loss functions, and where.

It sees the calls that torch's own functions get, and which module was at work at that moment, so it serves any recipe.
What nothing of torch computes (a kernel of one's own) is not seen. It must run on the eager model
(`ObjectiveState.plain_loss`, under `eval_mode`): inside a compiled graph there are no calls to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

LOSS_FUNCTIONS = {
    F.cross_entropy: "cross_entropy", F.nll_loss: "nll_loss", F.mse_loss: "mse_loss", F.l1_loss: "l1_loss",
    F.smooth_l1_loss: "smooth_l1_loss", F.huber_loss: "huber_loss", F.binary_cross_entropy: "binary_cross_entropy",
    F.binary_cross_entropy_with_logits: "binary_cross_entropy_with_logits", F.kl_div: "kl_div",
}  # fmt: skip
RECTIFIERS = {F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu6}  # a leaky one cannot die
BOUNDED_ACTIVATIONS = {torch.tanh: "tanh", Tensor.tanh: "tanh", torch.sigmoid: "sigmoid", Tensor.sigmoid: "sigmoid"}
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax}
DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}


class EmbeddingLookup(NamedTuple):
    """Rows taken from a table of embeddings."""

    module: str
    ids: Tensor
    num_rows: int


class LossCall(NamedTuple):
    """Predictions and targets as a loss function got them."""

    module: str
    function: str
    predictions: Tensor
    targets: Tensor
    ignore_index: int | None
    weight: Tensor | None


class AttentionCall(NamedTuple):
    """One call of attention: queries and keys, (..., T, D) and (..., S, D), or the logits (..., T, S) themselves."""

    module: str
    queries: Tensor | None
    keys: Tensor | None
    scale: float
    is_causal: bool
    mask: Tensor | None
    logits: Tensor | None = None


class ActivationCall(NamedTuple):
    """The output of a rectifier (`relu`), a tanh or a sigmoid."""

    module: str
    function: str
    output: Tensor


class ModuleOutput(NamedTuple):
    """A module that was called: its first tensor in, and out."""

    module: str
    entered: Tensor | None
    left: Tensor


class DropoutCall(NamedTuple):
    """A dropout that was at work, of its own or inside attention."""

    module: str
    share: float


Seen = EmbeddingLookup | LossCall | AttentionCall | ActivationCall | ModuleOutput | DropoutCall


class OpTracer(TorchFunctionMode):
    """`with OpTracer(model) as tracer: objective.plain_loss(batch, draw)`; then read what it saw, in order of calls.

    A subclass without room for lists of tensors overrides `note` and reduces them at once.
    """

    def __init__(self, model: nn.Module, keeps_modules: bool = False) -> None:
        super().__init__()
        self.lookups: list[EmbeddingLookup] = []
        self.loss_calls: list[LossCall] = []
        self.attention_calls: list[AttentionCall] = []
        self.activation_calls: list[ActivationCall] = []
        self.module_outputs: list[ModuleOutput] = []
        self.dropout_calls: list[DropoutCall] = []
        self._kept: dict[type, list[Any]] = {
            EmbeddingLookup: self.lookups, LossCall: self.loss_calls, AttentionCall: self.attention_calls,
            ActivationCall: self.activation_calls, ModuleOutput: self.module_outputs, DropoutCall: self.dropout_calls,
        }  # fmt: skip
        self._names = {module: name for name, module in model.named_modules()}
        self._keeps_modules = keeps_modules
        self._stack: list[str] = []
        self._handles: list[Any] = []

    @property
    def module(self) -> str:
        """The module at work; empty outside of all."""
        return self._stack[-1] if self._stack else ""

    def __enter__(self) -> OpTracer:
        self._handles = hooked(
            (module, partial(self._enter, name), partial(self._leave, name)) for module, name in self._names.items()
        )
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stack.clear()

    def note(self, seen: Seen) -> None:
        """Keeps what was seen, at the moment it is."""
        self._kept[type(seen)].append(seen)

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._stack.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack and self._stack[-1] == name:
            self._stack.pop()
        left = first_tensor([output])
        if self._keeps_modules and left is not None and left.is_floating_point():
            self.note(ModuleOutput(name, first_tensor(args), left.detach()))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note_inputs(function, args, kwargs)
        result = function(*args, **kwargs)
        if function in RECTIFIERS:
            self.note(ActivationCall(self.module, "relu", result.detach()))
        elif function in BOUNDED_ACTIVATIONS:
            self.note(ActivationCall(self.module, BOUNDED_ACTIVATIONS[function], result.detach()))
        return result

    def _note_inputs(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if (looked_up := _looked_up(function, args, kwargs)) is not None and looked_up.is_table:
            self.note(EmbeddingLookup(self.module, looked_up.ids.detach(), looked_up.num_rows))
        elif function is F.scaled_dot_product_attention:
            query, key = _argument(args, kwargs, 0, "query"), _argument(args, kwargs, 1, "key")
            scale = kwargs.get("scale") or query.shape[-1] ** -0.5
            is_causal = bool(_argument(args, kwargs, 5, "is_causal"))
            mask = _argument(args, kwargs, 3, "attn_mask")
            self._note_dropout(_argument(args, kwargs, 4, "dropout_p"))
            self.note(AttentionCall(self.module, query.detach(), key.detach(), scale, is_causal, mask))
        elif function in SOFTMAXES and _argument(args, kwargs, 1, "dim") in (-1, 3):
            logits = _argument(args, kwargs, 0, "input")
            if logits.dim() == 4:
                self.note(AttentionCall(self.module, None, None, 1.0, False, None, logits.detach()))
        elif function in DROPOUTS and _argument(args, kwargs, 2, "training") is not False:
            self._note_dropout(_argument(args, kwargs, 1, "p"))
        elif function in LOSS_FUNCTIONS:
            self.note(
                LossCall(
                    self.module,
                    LOSS_FUNCTIONS[function],
                    _argument(args, kwargs, 0, "input"),  # attached: somebody may ask for its gradient
                    _argument(args, kwargs, 1, "target").detach(),
                    kwargs.get("ignore_index", -100) if function in (F.cross_entropy, F.nll_loss) else None,
                    _argument(args, kwargs, 2, "weight"),
                )
            )

    def _note_dropout(self, share: float | None) -> None:
        if share:
            self.note(DropoutCall(self.module, share))


class OutOfRange(Exception):
    """An id or a label for which there is no row or no class; `place` counts through the tensor it was found in."""

    def __init__(self, what: str, module: str, value: int, limit: int, place: int, num_values: int) -> None:
        super().__init__(f"{what} {value} in {module or 'the loss'}, which has {limit}")
        self.what, self.module, self.value, self.limit = what, module, value, limit
        self.place, self.num_values = place, num_values


class BoundsCheck(OpTracer):
    """Looks before it calls: raises OutOfRange in place of a call that would end a process on CUDA."""

    def _note_inputs(self, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if (looked_up := _looked_up(function, args, kwargs)) is not None:
            self._refuse("id", looked_up.ids, looked_up.lowest, looked_up.num_rows)
        super()._note_inputs(function, args, kwargs)
        if function in (F.cross_entropy, F.nll_loss) and not self.loss_calls[-1].targets.is_floating_point():
            judged = self.loss_calls[-1]
            is_ignored = judged.targets.eq(judged.ignore_index if judged.ignore_index is not None else -100)
            self._refuse("label", judged.targets.masked_fill(is_ignored, 0), 0, num_classes(judged))

    def _refuse(self, what: str, ids: Tensor, lowest: int, limit: int) -> None:
        ids = ids.detach().long().flatten()  # comparing is not made for every small dtype
        is_bad = (ids < lowest) | (ids >= limit)
        if is_bad.any():
            place = int(is_bad.int().argmax())
            raise OutOfRange(what, self.module, int(ids[place]), limit, place, len(ids))


def num_classes(judged: LossCall) -> int:
    """Of a cross entropy; classes are the second axis where there is one."""
    return judged.predictions.shape[min(1, judged.predictions.dim() - 1)]


class _LookedUp(NamedTuple):
    ids: Tensor
    num_rows: int
    lowest: int  # of the ids that are legal: a bracket takes negative ones
    is_table: bool  # of trained rows, rather than any tensor


def _looked_up(function: Any, args: Any, kwargs: dict[str, Any]) -> _LookedUp | None:
    """The ids of a call that takes rows by number; None for every other call."""
    if function is F.embedding:
        ids, table = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight")
        return _LookedUp(ids, table.shape[0], 0, True)
    if function is torch.embedding:
        table, ids = _argument(args, kwargs, 0, "weight"), _argument(args, kwargs, 1, "indices")
        return _LookedUp(ids, table.shape[0], 0, True)
    if function is Tensor.__getitem__ and isinstance(args[1], Tensor):
        table, ids = args
        if ids.is_floating_point() or ids.dtype in (torch.bool, torch.uint8) or not table.dim():
            return None
        return _LookedUp(ids, table.shape[0], -table.shape[0], isinstance(table, nn.Parameter) and table.dim() == 2)
    if function in (torch.index_select, Tensor.index_select) and _argument(args, kwargs, 1, "dim") == 0:
        table, ids = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 2, "index")
        return _LookedUp(ids, table.shape[0], 0, isinstance(table, nn.Parameter) and table.dim() == 2)
    return None


def hooked(modules: Iterable[tuple[nn.Module, Callable[..., None], Callable[..., None]]]) -> list[Any]:
    """Hooks before and after the forward of modules; all, or none where one cannot be had. Returns their handles.

    A scripted module takes no hooks: what it does counts as done by the module around it.
    """
    handles: list[Any] = []
    try:
        for module, enter, leave in modules:
            if not isinstance(module, torch.jit.ScriptModule):
                handles.append(module.register_forward_pre_hook(enter, prepend=True))
                handles.append(module.register_forward_hook(leave, always_call=True))
    except BaseException:
        for handle in handles:
            handle.remove()
        raise
    return handles


def first_tensor(values: Any) -> Tensor | None:
    if isinstance(values, Tensor):
        return values
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, Iterable) and not isinstance(values, str):
        return next((found for value in values if (found := first_tensor(value)) is not None), None)
    return None


def _argument(args: Any, kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)

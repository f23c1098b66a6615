"""Whether a step will change everything that its author means to train: parameters, and rows of embeddings.

Known before the first step: which parameters are in an objective, which of them a backward reaches, and which row of a
table the loss depends on without giving it a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rung.doctor.preflight.forward import forward
from rung.doctor.preflight.result import CheckContext, NotApplicable, Result, check
from rung.engine.contract import read_loss
from rung.engine.evaluate import eval_mode
from rung.engine.op_tracer import BoundsCheck
from rung.engine.step import seed_torch


@check("parameters are trained", "O9")
def trained_parameters(context: CheckContext) -> Iterator[Result]:
    """Parameters that no step will ever change though they ask for a gradient, and such as the model does not know."""
    setup = context.setup
    named = dict(setup.state.model.named_parameters())
    num_trained = sum(len(o.parameters) for o in setup.state.objectives)
    results: list[Result] = []
    if left_out := [str(name) for name in setup.derived.get("left_out", ())]:
        seen = f"{len(left_out)} parameters want a gradient and are in no objective: {_some(left_out)}"
        remedy = "add them to a ParameterGroup, or declare them frozen with requires_grad_(False)"
        results.append(Result("warn", seen, remedy))
    micro, known = context.micro, {id(p) for p in named.values()}
    known |= {id(p) for o in setup.state.objectives for p in o.parameters}
    strange: dict[int, Tensor] = {}
    for objective in setup.state.objectives:
        batch = {name: tensor.clone() for name, tensor in micro.batch.items()}
        with (
            eval_mode(setup.state.model),
            torch.enable_grad(),
            setup.precision.autocast(),
            BoundsCheck(setup.state.model),
        ):
            seed_torch(objective.name, micro.draw)
            loss = read_loss(objective.plain_loss, objective.plain_loss(batch, micro.draw))
        strange |= {id(p): p for p in _leaves(loss.sum) if isinstance(p, nn.Parameter) and id(p) not in known}
    if strange:
        shapes = _some(["x".join(map(str, p.shape)) or "scalar" for p in strange.values()])
        seen = f"the loss uses {len(strange)} parameters that are not the model's: of shape {shapes}"
        remedy = (
            "register them: in an nn.ModuleList or nn.ParameterList in place of a Python list; as they are, no "
            "optimizer trains them and no checkpoint holds them"
        )
        results.append(Result("warn", seen, remedy, name="parameters are the model's"))
    yield from results
    if not results:
        yield Result("pass", f"{num_trained} in objectives, {len(named) - num_trained} frozen; none is left out")


def _leaves(loss: Tensor) -> list[Tensor]:
    """What a backward would reach."""
    todo, seen, found = [loss.grad_fn], set[Any](), list[Tensor]()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            found.append(variable)
        todo += [before for before, _ in node.next_functions]
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


class _Tables(TorchFunctionMode):
    """Keeps each lookup in a table of embeddings with what came out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        if function is F.embedding:
            ids = args[0] if args else kwargs["input"]
            table = args[1] if len(args) > 1 else kwargs["weight"]
            if isinstance(table, nn.Parameter) and table.requires_grad and found.requires_grad:
                self.seen.append((table, ids.detach(), found))
        return found


@check("embeddings are trained", "O9")
def trained_rows(context: CheckContext) -> Result:
    """Rows that the loss uses and no step changes: a `padding_idx` that is an id like any other.

    Padding lies at an end of a row. Only what lies between other ids, and on which the loss depends, counts.
    """
    tables = _Tables()
    loss = forward(context, context.micro, tables)
    if not tables.seen:
        raise NotApplicable("no table of embeddings is trained")
    names = {id(p): name for name, p in context.setup.state.model.named_parameters()}
    outputs = torch.autograd.grad(loss.sum, [out for *_, out in tables.seen], retain_graph=True, allow_unused=True)
    weights = torch.autograd.grad(loss.sum, [table for table, *_ in tables.seen], allow_unused=True)
    num_ids = 0
    for (table, ids, _), out, weight in zip(tables.seen, outputs, weights, strict=True):
        if out is None or weight is None or ids.dim() < 2:
            continue
        weight = weight.to_dense() if weight.is_sparse else weight
        by_row, is_used = ids.reshape(len(ids), -1), (out != 0).any(-1).reshape(len(ids), -1)
        for value in by_row[is_used].unique().tolist():
            num_ids += 1
            if weight[value].any():
                continue
            other = by_row != value
            is_inner = (other.cumsum(1) > 0) & (other.flip(1).cumsum(1).flip(1) > 0)
            if num := int(((by_row == value) & is_used & is_inner).sum()):
                seen = (
                    f"id {value} of {names.get(id(table), 'a table')} is used {num} times between other ids, and its "
                    "row gets no gradient"
                )
                remedy = f"leave out padding_idx={value}, or give padding an id that no data has"
                return Result("warn", seen, remedy)
    return Result("pass", f"rows of {num_ids} ids get a gradient where the loss depends on them")

"""Learning rates, clipping, spikes, tensors and batches that are off, and the same runs with that one thing right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rung.doctor.history import read
from rung.random import Draw
from rung.recipe import Arrays, Batch, Loss, Objective, ParameterGroup, Stream
from tests.cases import statistics as stat
from tests.cases.case import Ask, Case, Seen, diagnosed, trained
from tests.cases.made import own_loop
from tests.cases.numerics_cases import Regression
from tests.cases.running import run_case
from tests.cases.statistics import FACT
from tests.cases.tiny import Gpt, Rows, Tiny

# O3: projections that start at zero


class FromZero(Tiny):
    def model(self) -> nn.Module:
        model = cast(Gpt, super().model())
        for name, parameter in model.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.zeros_(parameter)
        return model


# O4: other people's loops, for rung has no SGD and never forgets to clip


def clipped(optimizer: str, limit: float, is_applied: bool = True) -> Ask:
    def ask(root: Path, seed: int) -> Seen:
        made: dict[str, torch.optim.Optimizer] = {}

        def update(model: nn.Module, loss: Tensor, row: dict[str, float]) -> None:
            kind = torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW
            step = made.setdefault("optimizer", kind(model.parameters(), lr=1e-2))
            step.zero_grad()
            loss.backward()
            row["norm"] = float(nn.utils.clip_grad_norm_(model.parameters(), limit if is_applied else 1e9))
            row["norm_clipped"] = min(row["norm"], limit) if is_applied else row["norm"]
            step.step()

        config = {"optimizer.name": optimizer, "optimizer.grad_clip": limit, "lr.learning_rate": 1e-2}
        return diagnosed(own_loop(update, config, seed))

    return ask


# O5: a batch of one repeated token at step 560


class Repeats(Rows):
    def gather(self, ids: np.ndarray, draw: Draw) -> Arrays:
        arrays = super().gather(ids, draw)
        return {"ids": np.full_like(arrays["ids"], 5)} if draw.step == 560 else arrays


class OneToken(Tiny):
    def streams(self) -> Mapping[str, Stream]:
        plain = super().streams()
        train = cast(Rows, plain["train"])
        return {**plain, "train": Repeats(train.fingerprint, ids=train.arrays["ids"])}


# O5: weights that one step throws off, as a rate that is far too high does; and a loss with a long tail


class ThrownOff(Tiny):
    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        [plain] = super().objectives(model)
        done: list[int] = []

        def loss(batch: Batch, draw: Draw) -> Loss:
            if draw.step == 130 and not done:
                done.append(draw.step)
                with torch.no_grad():
                    for p in model.parameters():
                        p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).sign()
            return plain.loss(batch, draw)

        return [plain._replace(loss=loss)]


class WrongLabels(Tiny):
    """One label in a hundred is wrong, which a batch of sixteen shows as a jump of the loss: healthy."""

    def streams(self) -> Mapping[str, Stream]:
        def labelled(num_rows: int, seed: int) -> Stream:
            rng = np.random.default_rng(seed)
            x = rng.standard_normal((num_rows, 8)).astype(np.float32)
            y = (x[:, 0] > 0) ^ (rng.random(num_rows) < 0.01)
            return Rows(f"labels/{seed}", 1, x=x, y=y.astype(np.int64))

        return {"train": labelled(20000, 1), "val": labelled(500, 2)}

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        def labels(batch: Batch, draw: Draw) -> Loss:
            losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
            return Loss(losses, torch.tensor(float(len(batch["y"]))))

        return [Objective("labels", [ParameterGroup("all", model.parameters())], labels)]


# O7: twelve layers of sigmoids, or of ReLUs with the weights that fit them


class Deep(Regression):
    activation: type[nn.Module] = nn.ReLU

    def model(self) -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(8, 32)]
        for _ in range(11):
            layers += [self.activation(), nn.Linear(32, 32)]
        layers += [self.activation(), nn.Linear(32, 1)]
        if self.activation is nn.ReLU:
            for layer in layers[:-1]:
                if isinstance(layer, nn.Linear):
                    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return nn.Sequential(*layers)


class DeepSigmoid(Deep):
    activation = nn.Sigmoid


# O8: one layer with a rate of its own


class OneRate(Tiny):
    layer, times = "head.weight", 1.0

    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        [plain] = super().objectives(model)
        named = dict(model.named_parameters())
        rest = [p for name, p in named.items() if name != self.layer]
        other = Objective("other", [ParameterGroup("head", [named[self.layer]], self.times)], plain.loss)
        return [plain._replace(groups=[ParameterGroup("rest", rest)]), other]


class FastHead(OneRate):
    times = 100.0


class SlowLayer(OneRate):
    layer, times = "blocks.0.mlp.2.weight", 0.01


# O9: a module that the loss cannot reach, or that no optimizer has


class Detached(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.inner(x)).detach()


class DetachedLayer(Tiny):
    def model(self) -> nn.Module:
        model = cast(Gpt, super().model())
        model.blocks[1].mlp = Detached(cast(nn.Module, model.blocks[1].mlp))
        return model


class LeftOut(Tiny):
    def objectives(self, model: nn.Module) -> Sequence[Objective]:
        [plain] = super().objectives(model)
        few = [p for name, p in model.named_parameters() if not name.startswith("blocks.1")]
        return [plain._replace(groups=[ParameterGroup("few", few)])]


# O11: eight times the batch of the parent, with and without the rate that goes with it


def after_parent(*overrides: str) -> Ask:
    def ask(root: Path, seed: int) -> Seen:
        few = ("data.batch_size=4", "optimizer.max_iters=100")
        parent = run_case(Tiny, root, *few, seed=seed)
        return diagnosed(read(run_case(Tiny, root, *few, *overrides, seed=seed, parent=parent.id)))

    return ask


LONGER = "optimizer.max_iters=600"
DECAYED = "optimizer.weight_decay=1"
LARGER = "optimizer.gradient_accumulation_steps=8"
CLIPPED = stat.held("O4", stat.norm_over_clip)
APART = stat.held("O8", stat.update_apart)
CASES = [
    Case("O1", "rate x 300", trained(Tiny, "lr.learning_rate=1"), trained(Tiny), is_quick=True,
         statistic=stat.held("O1", stat.rate_too_high)),
    Case("O2", "rate / 100", trained(Tiny, "lr.learning_rate=3e-5"), trained(Tiny),
         statistic=stat.of(stat.rate_too_low)),
    Case("O3", "no warm-up", trained(Tiny, "lr.learning_rate=3e-2", "lr.warmup_iters=0"),
         trained(Tiny, "lr.learning_rate=3e-2", "lr.warmup_iters=20"), statistic=stat.of(stat.first_updates)),
    Case("O3", "from zero", trained(FromZero, "lr.learning_rate=3e-2", "lr.warmup_iters=0"), trained(FromZero),
         statistic=stat.of(stat.first_updates)),
    Case("O4", "always, adam", trained(Tiny, "optimizer.grad_clip=0.05"), trained(Tiny, "optimizer.grad_clip=3"),
         "info", statistic=CLIPPED),
    Case("O4", "always, sgd", clipped("sgd", 0.05), clipped("sgd", 3.0), statistic=CLIPPED),
    Case("O4", "not applied", clipped("adamw", 0.05, is_applied=False), clipped("adamw", 1.0),
         statistic=stat.of(stat.not_clipped)),
    Case("O5", "one token", trained(OneToken, LONGER), trained(Tiny, LONGER),
         statistic=stat.spike(left_spread=(0.09, 0.2))),
    Case("O5", "thrown off", trained(ThrownOff, LONGER), trained(WrongLabels, "optimizer.max_iters=1200"),
         statistic=stat.spike(left_spread=(0.09, 0.2))),
    Case("O6", "eps 0.1", trained(Tiny, "optimizer.eps=0.1"), trained(Tiny, "optimizer.eps=1e-8"),
         statistic=stat.held("O6", stat.eps_against_gradients)),
    Case("O7", "twelve sigmoids", trained(DeepSigmoid), trained(Deep), statistic=stat.held("O7", stat.least_flow)),
    Case("O8", "fast head", trained(FastHead, DECAYED), trained(OneRate, DECAYED), statistic=APART),
    Case("O8", "slow layer", trained(SlowLayer), trained(OneRate), statistic=APART),
    Case("O8", "slow layer, longer", trained(SlowLayer, LONGER), trained(Tiny, LONGER, "num_rows=20000"),
         statistic=APART),
    Case("O9", "detached", trained(DetachedLayer), trained(Tiny), "sick", statistic=FACT),
    Case("O9", "left out", trained(LeftOut), trained(Tiny), "info", statistic=FACT),
    Case("O11", "batch x 8", after_parent(LARGER), after_parent(LARGER, "lr.learning_rate=8.5e-3"), statistic=FACT),
]  # fmt: skip

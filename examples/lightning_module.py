"""The Lightning Trainer with rung's lab book: python examples/lightning_module.py"""

from __future__ import annotations

import tempfile

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rung
from rung.script.lightning import RungCallback, RungLogger


class Sine(lightning.LightningModule):
    def __init__(self, width: int = 32, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def batches(num_rows: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    x = 6 * torch.rand(num_rows, 1, generator=torch.Generator().manual_seed(seed)) - 3
    return DataLoader(TensorDataset(x, x.sin()), batch_size=16)


lightning.seed_everything(3)
module = Sine()
logger = RungLogger("sine", why="how wide must it be?")
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        max_epochs=6,
        logger=logger,
        callbacks=[RungCallback(logger)],
        log_every_n_steps=1,
        accelerator="cpu",
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches(160, seed=0), batches(64, seed=1))
rung.finish()

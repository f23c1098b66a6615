"""A recipe that trains in a moment and can be played, for the verb itself."""

from __future__ import annotations

import torch
from torch import nn

from rung.recipe import Player, Plays
from tests.contract.toy import Toy
from tests.web.fake import FakePlayer, FakeWalk


class Playable(Toy, Plays):
    def player(self, model: nn.Module) -> Player:
        assert not model.training
        assert not torch.is_grad_enabled()
        return WithoutGradients()


class WithoutGradients(FakePlayer):
    """Fails in a thread where torch would keep what it needs for a backward pass."""

    def walk(self, place: int, offset: int = 0) -> FakeWalk:
        assert not torch.is_grad_enabled()
        return super().walk(place, offset)

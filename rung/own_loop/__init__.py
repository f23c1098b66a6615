"""The lab book and the guard for a training loop that is not rung's.

    run = rung.init("mine", config={"lr": 1e-3})     a run like any other: rung show, diff, doctor, report
    run.log({"loss": loss, "val/loss": val_loss})
    run.watch(model, optimizer)                      gradient norms, lr, norms per tensor

    guard = rung.guard(model, optimizer, loss=loss, out="captures")
    guard.step(value, batch)                         in place of optimizer.step()
    guard.replay()                                   after rung.Diverged: which operation, which sample, why

The loop stays its owner's, and learns the same to the bit with and without. torch is imported by what needs it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rung.own_loop.again import replay as replay
    from rung.own_loop.current import init as init
    from rung.own_loop.guarded import Guarded as Guarded
    from rung.own_loop.guarded import guard as guard
    from rung.own_loop.run import OwnRun as OwnRun

_HOMES = {"replay": "again", "init": "current", "OwnRun": "run", "Guarded": "guarded", "guard": "guarded"}
__all__ = ["Guarded", "OwnRun", "guard", "init", "replay"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f"rung.own_loop.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'rung.own_loop' has no attribute {name!r}")

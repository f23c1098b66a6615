"""The guard, the capture and the replay for a training loop that is not rung's.

    guard = rung.guard(model, optimizer, loss=loss, out="captures")
    guard.step(value, batch)                      in place of optimizer.step()
    guard.replay()                                after rung.Diverged: which operation, which sample, why

The loop stays its owner's: nothing is hooked into the model, and a healthy run is the same to the bit with and without.
"""

from rung.own_loop.again import replay
from rung.own_loop.guarded import Guarded, guard

__all__ = ["Guarded", "guard", "replay"]

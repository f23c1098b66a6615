"""The core for training loops that are not rung's.

    run = rung.init("mine", config={"lr": 1e-3})     a run like any other: rung show, diff, doctor, report
    run.log({"loss": loss, "val/loss": val_loss})
    run.watch(model, optimizer)                      gradient norms, lr, norms per tensor

    guard = rung.guard(model, optimizer, loss=loss, out="captures")
    guard.step(value, batch)                         in place of optimizer.step()
    guard.replay()                                   after rung.Diverged: which operation, which sample, why

The loop stays its owner's and learns the same to the bit with and without. torch is imported by what needs it.
"""

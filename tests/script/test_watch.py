"""If this fails, what a watched optimizer did is recorded wrongly, or watching it changes what is learned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rung
from rung.runs.metrics import read_tables
from rung.script.current import current
from rung.script.run import OwnRun
from rung.script.watch import TimeBudget
from tests.script.test_run import ended

Start = Callable[..., OwnRun]


def built(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randint(8, (16,), generator=torch.Generator().manual_seed(step))
    return (model(x)[:, 0] - x).pow(2).mean()


@pytest.mark.parametrize("with_closure", [False, True], ids=["plain", "closure"])
@pytest.mark.parametrize("is_named", [True, False], ids=["optimizer", "found by itself"])
def test_norms_are_those_of_an_independent_measurement(start: Start, is_named: bool, with_closure: bool) -> None:
    run = start()
    model, optimizer = built()
    other = torch.optim.SGD(nn.Linear(1, 1).parameters())  # of something else, which is not watched
    run.watch(model, optimizer if is_named else None, every=5, share=1)
    norms, weights, updates = [], [], []
    for step in range(30):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            norms.append([float(p.grad.norm()) for p in model.parameters() if p.grad is not None])
            return loss

        other.step()
        before = [p.detach().clone() for p in model.parameters()]
        if with_closure:
            loss: Any = optimizer.step(closure)  # as Lightning does
        else:
            loss = closure()
            optimizer.step()
        weights.append([float(p.norm()) for p in before])
        updates.append([float((p.detach() - b).norm()) for p, b in zip(model.parameters(), before)])
        run.log({"loss": loss})
    found = ended(run)
    rows = found.metrics(["norm", "lr", "loss"])
    assert rows["step"] == list(range(30))
    assert rows["norm"] == pytest.approx([sum(n * n for n in some) ** 0.5 for some in norms], rel=1e-5)
    assert rows["lr"] == [1e-2] * 30
    tables = read_tables(found.path / "tables")["tensors"]
    assert tables[0]["names"] == [name for name, _ in model.named_parameters()]
    assert [table["step"] for table in tables] == [0, 1, 2, 3, 4, 5, 10, 15, 20, 25]
    for table in tables:
        for column, truth in (("grad", norms), ("weight", weights), ("update", updates)):
            assert table[column] == pytest.approx(truth[table["step"]], rel=1e-4, abs=1e-7), column


def test_all_of_the_time_pays_for_all_norms() -> None:
    for share, is_affordable in ((1.0, True), (0.003, False)):
        purse = TimeBudget(share)
        purse.spent(begun=-1e9)  # far more than can have been earned
        assert purse.is_affordable() is is_affordable


def test_the_start_is_known_and_the_optimizer_described(start: Start) -> None:
    from rung.engine.fingerprints import checksums

    run = start(config={"weight_decay": 0.01})
    model, optimizer = built(seed=11)
    begun = checksums(model)
    run.watch(model, optimizer)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        run.log({"loss": 1.0})
    found = ended(run)
    assert found.initial_weights() == begun
    assert found.document["seed"] == 11
    assert found.document["derived"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert found.config()["optimizer"] == {
        "name": "adamw", "eps": 1e-8, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "amsgrad": False,
    }  # fmt: skip
    assert found.sources()["optimizer.weight_decay"] == "derived: from weight_decay"
    assert found.sources()["optimizer.eps"] == "the optimizer"


def trained(watch: Callable[[nn.Module, Any], None]) -> list[Tensor]:
    model, optimizer = built()
    watch(model, optimizer)
    for step in range(25):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if current() is not None:
            rung.log({"loss": loss})
    return [p.detach().clone() for p in model.parameters()]


def test_what_is_learned_is_the_same_to_the_bit(start: Start) -> None:
    bare = trained(lambda model, optimizer: None)
    run = start()
    watched = trained(lambda model, optimizer: run.watch(model, optimizer, every=1, share=1))
    assert all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True))


def test_a_norm_that_the_script_logs_is_the_one_before_clipping(start: Start) -> None:
    run = start()
    model, optimizer = built()
    run.watch(model, optimizer)
    for step in range(12):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        if step % 3 == 2:
            run.log({"loss": 1.0, "grad_norm": norm}, step=step)
    rows = ended(run).metrics(["norm", "norm_clipped"])
    assert rows["step"] == list(range(12))
    assert [v is not None for v in rows["norm"]] == [step % 3 == 2 for step in range(12)]
    assert rows["norm_clipped"] == pytest.approx([0.1] * 12, rel=1e-3)


def test_a_fused_optimizer_under_a_scaler_shows_true_norms(start: Start) -> None:
    run = start()
    model, _ = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run.watch(model, optimizer)
    loss = loss_of(model, 0)
    wanted = torch.stack(
        [g.norm() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]
    ).norm()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    run.log({"loss": loss})
    assert ended(run).metrics(["norm"])["norm"] == pytest.approx([float(wanted)], rel=1e-4)


def test_several_optimizers_make_one_update(start: Start) -> None:
    run = start()
    model, _ = built()
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    optimizers = [torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(second, lr=0.01)]
    run.watch(model, optimizers, every=1, share=1)
    for step in range(4):
        model.zero_grad()
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
        run.log({"loss": 1.0})
    found = ended(run)
    assert found.metrics(["norm"])["step"] == [0, 1, 2, 3]
    assert len(read_tables(found.path / "tables")["tensors"][0]["names"]) == len(list(model.parameters()))


@pytest.mark.parametrize("optimizer", [object(), 3, "adam"])
def test_what_cannot_be_watched_is_told(start: Start, optimizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = start()
    run.watch(nn.Linear(1, 1), optimizer)
    run.log({"loss": 1.0})
    assert "takes an optimizer of torch" in capsys.readouterr().err


def test_an_optimizer_whose_state_is_odd_does_not_end_training(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    model, optimizer = built()
    run.watch(model, optimizer)
    monkeypatch.setattr("rung.script.watch.Layers", lambda *of: 1 / 0)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.step()
    run.log({"loss": 1.0})
    assert "no longer watched" in next(ended(run).events("warning"))["text"]


def test_a_guard_in_a_run_leaves_its_capture_there(start: Start) -> None:
    run = start()
    model, optimizer = built()

    def loss(x: Tensor) -> Tensor:
        return (model(x)[:, 0] - torch.log(x.float())).pow(2).mean()

    guard = run.guard(model, optimizer, loss=loss, clip=1e-3)

    def train() -> None:
        for step in range(10):
            x = torch.ones(4, dtype=torch.long) * (0 if step == 6 else 2)
            value = loss(x)
            value.backward()
            guard.step(value, x)
            optimizer.zero_grad()
            run.log({"loss": value})

    with pytest.raises(rung.Diverged), run:
        train()
    assert run.path is not None
    assert run.status == "diverged"
    assert [path.name for path in (run.path / "captures").iterdir()] == ["00000006"]
    from rung.runs.query import open_run

    found = open_run(str(run.path), run.path)
    assert [event["step"] for event in found.events("diverged")] == [6]
    rows = found.metrics(["norm", "norm_clipped"])
    assert min(rows["norm"][:6]) > 1e-2 > max(rows["norm_clipped"][:6])
    assert guard.replay().origin


def test_norms_that_cost_too_much_are_left_out_after_the_first(start: Start) -> None:
    run = start()
    model, optimizer = built()
    run.watch(model, optimizer, share=0)
    for step in range(40):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        run.log({"loss": 1.0})
    found = ended(run)
    rows = found.metrics(["norm", "lr"])
    assert [norm is not None for norm in rows["norm"][:20]] == [True] * 20
    assert sum(norm is not None for norm in rows["norm"][20:]) <= 1
    assert rows["lr"] == [1e-2] * 40

"""If this fails, a GPU learns something else than the CPU, or waits for what it need not wait for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rung.engine.clock import Clock
from rung.engine.loop import fit
from rung.engine.prefetch import Origin, Prefetcher
from rung.engine.state import set_training
from rung.nn.attention import Mask, attend, kernels_for_masks
from rung.nn.generate import Execution, generate, in_cuda_graph
from rung.nn.transformer import Shape, Transformer
from rung.runs.query import Run, open_run
from rung.runs.record import Record
from tests.contract.cases import CASES, Case
from tests.contract.test_contract import Mute, record_of

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CUDA = "system.device=cuda"


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    make, data = CASES[request.param]
    return make(request.getfixturevalue(data))


def train(case: Case, root: Path, name: str, *words: str) -> Run:
    setup = case.setup(*words, root=root)
    record: Record = record_of(setup, root, name)
    outcome = fit(setup, record, Mute())
    record.finish(outcome.status)
    return open_run(record.id, root)


def losses(run: Run) -> list[float]:
    return [value for value in run.metrics(["loss"])["loss"] if value is not None]


def test_the_same_losses_as_on_the_cpu(case: Case, tmp_path: Path) -> None:
    cpu = train(case, tmp_path, "cpu", *case.calm)
    gpu = train(case, tmp_path, "gpu", CUDA, *case.calm)
    assert losses(gpu) == pytest.approx(losses(cpu), rel=2e-3)
    assert [(row["step"], row["set"]) for row in gpu.evals()] == [(row["step"], row["set"]) for row in cpu.evals()]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_precision_stays_near(case: Case, tmp_path: Path, dtype: str) -> None:
    full = train(case, tmp_path, "full", CUDA, *case.calm)
    low = train(case, tmp_path, "low", CUDA, f"system.dtype={dtype}", *case.calm)
    pairs = [(a, b) for a, b in zip(losses(full), losses(low)) if np.isfinite(b)]
    assert len(pairs) >= 8
    assert [b for _, b in pairs[:4]] == pytest.approx([a for a, _ in pairs[:4]], rel=0.05)


def test_compiled_and_eager_agree_without_recompiling(case: Case, tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    eager = train(case, tmp_path, "eager", CUDA, *case.calm)
    counters.clear()
    compiled = train(case, tmp_path, "compiled", CUDA, "system.compile=true", "eval_interval=0", *case.calm)
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-3)
    assert counters["stats"]["unique_graphs"] <= 6, dict(counters["stats"])


def test_a_bad_step_is_not_applied_though_nobody_waited(case: Case) -> None:
    setup = case.setup(CUDA)
    set_training(setup.state.model)
    prefetcher = setup.prefetcher()
    objective = setup.stepper.objectives[0]
    setup.stepper.step(0, prefetcher.take(0), 1e-3, Clock())
    before = [p.clone() for p in objective.parameters]
    moments = [v.clone() for o in objective.optimizers for s in o.state.values() for v in s.values()]
    with torch.no_grad():
        victim = objective.parameters[0].clone()
        objective.parameters[0].fill_(float("nan"))  # all of it: one row of a token table may be of an id not in use
    setup.stepper.step(1, prefetcher.take(1), 1e-3, Clock())
    with torch.no_grad():
        objective.parameters[0].copy_(victim)
    for step in range(2, 5):
        setup.stepper.step(step, prefetcher.take(step), 1e-3, Clock())
    prefetcher.close()
    after = [v for o in objective.optimizers for s in o.state.values() for v in s.values()]
    assert all(torch.equal(p, q) for p, q in zip(before, objective.parameters, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(moments, after, strict=True))


def test_a_step_does_not_wait_for_the_gpu(case: Case) -> None:
    setup = case.setup(CUDA)
    set_training(setup.state.model)
    prefetcher = setup.prefetcher()
    for step in range(3):
        setup.stepper.step(step, prefetcher.take(step), 1e-3, Clock())
    micros = prefetcher.take(3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        setup.stepper.step(3, micros, 1e-3, Clock())
    finally:
        torch.cuda.set_sync_debug_mode("default")
        prefetcher.close()


@pytest.mark.parametrize("num_keys", [64, 128, 192])
def test_attention_with_a_mask_has_finite_gradients(num_keys: int) -> None:
    """One default kernel gives NaN for some numbers of keys where all that a query may see is far away."""
    q = torch.full((2, 1, num_keys, 64), 4.0, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = torch.full_like(q, -4.0), torch.randn_like(q)
    allow = torch.ones(2, 1, num_keys, num_keys, dtype=torch.bool, device="cuda").tril()
    attend(q, k, v, Mask(allow_B1TS=allow), None, 0.0).sum().backward()
    assert q.grad is not None
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("num_columns", [63, 64])
def test_rows_that_begin_later_have_finite_gradients(num_columns: int) -> None:
    """A model of transformers masks all that queries before the beginning of a row could see."""
    llama = pytest.importorskip("transformers")
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "vocab_size": 50}
    model = llama.LlamaForCausalLM(llama.LlamaConfig(**config, intermediate_size=64)).cuda()
    given = torch.randn(4, num_columns, 64, device="cuda", requires_grad=True)
    mask = torch.arange(num_columns, device="cuda") >= torch.tensor([[0], [1], [20], [40]], device="cuda")
    with torch.autocast("cuda", torch.bfloat16), kernels_for_masks(mask.device):
        model(inputs_embeds=given, attention_mask=mask.long()).logits[:, -5:].float().sum().backward()
    assert given.grad is not None
    assert torch.isfinite(given.grad).all()


def test_batches_arrive_as_they_were_gathered(case: Case) -> None:
    setup = case.setup(CUDA)
    cpu, gpu = (
        Prefetcher(setup.streams["train"], setup.layout, 1, torch.device(device), 2, Origin())
        for device in ("cpu", "cuda")
    )
    for step in range(50):
        for a, b in zip(cpu.take(step), gpu.take(step), strict=True):
            assert all(torch.equal(a.batch[name], b.batch[name].cpu()) for name in a.batch)
    cpu.close()
    gpu.close()


def test_resume_goes_on_as_before(case: Case, tmp_path: Path) -> None:
    from rung.engine.build import restore
    from rung.engine.checkpoint import Checkpoints

    whole = train(case, tmp_path, "whole", CUDA)
    setup = case.setup(CUDA, root=tmp_path)
    restore(setup, Checkpoints(whole.path / "checkpoints").at(8))
    record = record_of(setup, tmp_path, "rest")
    fit(setup, record, Mute())
    record.finish("finished")
    assert losses(open_run(record.id, tmp_path)) == pytest.approx(losses(whole)[8:], rel=1e-4)


@pytest.mark.filterwarnings("error:generation runs without a CUDA graph")
@pytest.mark.parametrize("more", [{}, {"positions": "rotary", "n_kv_head": 2, "qk_norm": True, "norm": "rmsnorm"}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cuda_graph_generates_what_plain_steps_generate(more: dict, temperature: float) -> None:
    """In float32, with full contexts, prompts of different lengths and drawn ids."""
    model = Transformer(Shape(300, 48, n_layer=3, n_head=4, n_embd=64, **more)).cuda()
    ids = torch.randint(300, (3, 20), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    made = [
        generate(
            model, ids, 60, lengths=[20, 3, 11], temperature=temperature, top_k=50,
            generator=torch.Generator("cuda").manual_seed(1), execution=execution,
        )
        for execution in (Execution(), Execution(True, 2, in_cuda_graph), None)
    ]  # fmt: skip
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[1], made[2])


def test_generating_does_not_wait_for_the_gpu() -> None:
    model = Transformer(Shape(300, 128, n_layer=2, n_head=4, n_embd=64)).cuda()
    ids = torch.zeros(2, 4, dtype=torch.long, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        generate(model, ids, 40, temperature=0, execution=Execution(True, 2))
    finally:
        torch.cuda.set_sync_debug_mode("default")

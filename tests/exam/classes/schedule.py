"""The learning rate does not do what its author thinks."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "the schedule of the learning rate is wrong",
    r"warm-?up|schedul|learning rate|\blr\b",
    [
        Shape(
            "gpt/warm-up longer than the run",
            "gpt",
            [("warmup_iters, max_iters = 3e-3, 3e-4, 20, 300", "warmup_iters, max_iters = 3e-3, 3e-4, 2000, 300")],
            twin=True,
            says=r"warm-?up",
        ),
        Shape(
            "cnn/decay for epochs, stepped every batch",
            "cnn",
            [
                (
                    'torch.optim.lr_scheduler.OneCycleLR(optimizer, config["lr"], total_steps=config["epochs"] * len(loader))',
                    "torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.3)",
                )
            ],
            says=r"schedul|(learning )?rate (falls|decays|is|has|reach|was|fell|drop|goes)|\blr\b.*(0|zero|tiny|early|small)|too early",
        ),
        Shape(
            "mlp/cosine of epochs, stepped every batch",
            "mlp",
            [("T_max=STEPS)", "T_max=8)")],
            twin=True,
            says=r"restart|oscillat|swing|cycl|schedul|up and down|rises again|period|T_max",
        ),
        Shape(
            "gru/integer division keeps it at 0",
            "gru",
            [
                (
                    '    rise = (step + 1) / cfg["warmup"]\n    return min(1.0, rise, max(0.05, 1 - step / cfg["steps"]))',
                    '    rise = (step + 1) // (10 * cfg["warmup"])\n    return min(1.0, rise, max(0.05, 1 - step / cfg["steps"]))',
                )
            ],
            says=r"(learning rate|\blr\b|rate).*(\b0\b|zero)|warm-?up|never (moved|changed)",
        ),
    ],
)

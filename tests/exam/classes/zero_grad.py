"""Gradients of earlier steps are never cleared."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "gradients of earlier steps add up",
    r"zero_grad|(gradients?|they) (of (earlier|all|previous) steps )?(add up|accumulate|are never cleared|pile)|not (cleared|zeroed)|never (cleared|zeroed)|earlier steps",
    [
        Shape("gpt/forgotten", "gpt", [("    optimizer.zero_grad(set_to_none=True)\n", "")], twin=True),
        Shape(
            "cnn/once an epoch",
            "cnn",
            [
                ("        optimizer.zero_grad()\n", ""),
                ("    model.train()\n", "    model.train()\n    optimizer.zero_grad()\n"),
            ],
        ),
        Shape(
            "mlp/of another optimizer",
            "mlp",
            [("    optimizer.zero_grad()\n", "    teacher.zero_grad()\n")],
            both=[("\n\ndef loss_fn", "\nteacher = torch.optim.Adam(truth.parameters(), lr=LR)\n\n\ndef loss_fn")],
            twin=True,
        ),
        Shape(
            "gru/with micro-batches and SGD",
            "gru",
            [("    optimizer.zero_grad()\n", "")],
            both=[
                (
                    'torch.optim.AdamW(model.parameters(), lr=cfg["lr"])',
                    'torch.optim.SGD(model.parameters(), lr=20 * cfg["lr"], momentum=0.9)',
                )
            ],
        ),
    ],
)

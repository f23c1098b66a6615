"""The target is the input: the shift by one is missing, and the model learns to copy."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "the target is part of the input",
    r"cop(y|ies|ied)|shift|sees? (its|the|their) (own )?(target|answer|label)|targets? (is|are|equals?|in) (the |its |their )?(own )?input|leak|look-?ahead|future|identity|input.{0,30}target|too good|causal|comes? after",
    [
        Shape(
            "gpt/y is x",
            "gpt",
            [
                (
                    "y = torch.stack([part[i + 1 : i + 1 + block_size] for i in ix])",
                    "y = torch.stack([part[i : i + block_size] for i in ix])",
                )
            ],
            twin=True,
        ),
        Shape(
            "gru/last value among the inputs, bfloat16 autocast",
            "gru",
            [
                ("        x, y = series[:, :-1], series[:, 1:]", "        x, y = series[:, 1:], series[:, 1:]"),
                ("mse(model(val[:, :-1]), val[:, 1:])", "mse(model(val[:, 1:]), val[:, 1:])"),
            ],
            both=[
                (
                    '        loss = mse(model(x), y) / cfg["micros"]',
                    '        with torch.autocast("cpu", torch.bfloat16):\n            found = model(x)\n        loss = mse(found.float(), y) / cfg["micros"]',
                )
            ],
        ),
        Shape(
            "bytes/no shift",
            "bytes_gru",
            [("logits, _ = model(ids[:, :-1])", "logits, _ = model(ids[:, 1:])")],
            twin=True,
        ),
        Shape(
            "steering/the next state goes in, with noise added",
            "steering",
            [("found = model(states[:, :-1], controls[:, :-1])", "found = model(noisy[:, 1:], controls[:, 1:])")],
            both=[
                (
                    '            states, controls = batch["states"].float(), batch["controls"].float()\n',
                    '            states, controls = batch["states"].float(), batch["controls"].float()\n            noisy = states + 0.02 * draw.noise("noise", states.shape[1:], states.device)\n',
                )
            ],
        ),
    ],
)

"""The script raises."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "the script crashed, with the line it crashed in",
    r"crash|raised|exception|error",
    [
        Shape(
            "gpt/index outside of the table",
            "gpt",
            [
                (
                    "    for _ in range(accumulation):\n",
                    "    if it == 130:\n        train_data[:] = len(chars)\n    for _ in range(accumulation):\n",
                )
            ],
            twin=True,
            says=r"IndexError|index out of range",
        ),
        Shape(
            "cnn/the last batch of an epoch is smaller",
            "cnn",
            [("0.1 * torch.randn_like(x)", '0.1 * torch.randn(config["batch_size"], 1, 8, 8)')],
            says=r"RuntimeError|size of tensor",
        ),
        Shape(
            "gru/key that is not in the config",
            "gru",
            [
                (
                    "        model.train()\n",
                    '        if step > 200:\n            cfg["patience"] -= 1\n        model.train()\n',
                )
            ],
            twin=True,
            says=r"KeyError|patience",
        ),
        Shape(
            "steering/assertion in gather at a later epoch",
            "steering",
            [
                (
                    '        return {"states": self.states[ids], "controls": self.controls[ids]}',
                    '        assert draw.is_eval or ids.max() < 2999, "drive 2999 is empty"\n        return {"states": self.states[ids], "controls": self.controls[ids]}',
                )
            ],
            says=r"AssertionError|drive 2999|2999",
        ),
    ],
)

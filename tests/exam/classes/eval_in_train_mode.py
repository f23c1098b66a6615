"""Evals run in training mode: dropout is on, batch norm uses and updates its statistics."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "evals run in training mode",
    r"train(ing)? mode|eval\(\)|eval mode|dropout|batch ?norm|mode\b|running (mean|statistic)|not repeat|differs? .*(twice|again)|deterministic",
    [
        Shape(
            "gpt/dropout",
            "gpt",
            [("    model.eval()\n", "")],
            both=[
                ("n_embd, dropout = 2, 2, 32, 0.0", "n_embd, dropout = 2, 2, 32, 0.25"),
            ],
            twin=True,
        ),
        Shape(
            "cnn/batch norm and dropout",
            "cnn",
            [("    model.eval()\n", "")],
            both=[('"dropout": 0.1', '"dropout": 0.3')],
            twin=True,
        ),
        Shape(
            "gru/only once switched to eval and then train",
            "gru",
            [
                ("        model.eval()\n", ""),
                ("        model.train()\n", "        model.eval()\n        model.train()\n"),
            ],
            both=[("dropout=0.0", "dropout=0.3")],
        ),
        Shape(
            "steering/dropout by F.dropout in the recipe",
            "steering",
            [("nn.functional.dropout(hidden, 0.2, self.training)", "nn.functional.dropout(hidden, 0.2)")],
            both=[
                (
                    "        past = nn",
                    "        hidden = nn.functional.dropout(hidden, 0.2, self.training)\n        past = nn",
                )
            ],
        ),
    ],
)

"""A logged value is NaN or infinite; the loss is not."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "a logged value is not finite",
    r"\bnan\b|not finite|non-finite|infinit|\binf\b",
    [
        Shape(
            "cnn/recall of a class that is not there",
            "cnn",
            [("(val_y == 3)", "(val_y == 4)")],
            both=[
                (
                    '"val/acc": (logits.argmax(1) == val_y).float().mean()}',
                    '"val/acc": (logits.argmax(1) == val_y).float().mean(), "val/recall": (logits.argmax(1) == val_y)[(val_y == 3)].float().mean()}',
                )
            ],
            twin=True,
        ),
        Shape(
            "gpt/perplexity of a sum overflows",
            "gpt",
            [("math.inf if loss > 700 else math.exp(loss)", "math.exp(loss) * math.inf")],
            both=[
                (
                    '            "grad_norm": norm,\n',
                    '            "grad_norm": norm,\n            "perplexity": math.inf if loss > 700 else math.exp(loss),\n',
                )
            ],
        ),
        Shape(
            "mlp/correlation of one sample",
            "mlp",
            [("make(512)", "make(1)")],
            both=[
                (
                    '            run.log({"val/loss": loss_fn((x_val, y_val))})',
                    '            found = model(x_val)[:, 0]\n            run.log({"val/loss": loss_fn((x_val, y_val)), "val/spread": found.std() / y_val.std()})',
                )
            ],
            twin=True,
        ),
        Shape(
            "gru/empty set of hard series",
            "gru",
            [("val[val.std((1, 2)) > 0.1]", "val[val.std((1, 2)) > 10]")],
            both=[
                (
                    "        with torch.no_grad():\n",
                    '        with torch.no_grad():\n            hard = val[val.std((1, 2)) > 0.1]\n            run.log({"hard/error": (model(hard[:, :-1]) - hard[:, 1:]).abs().mean()}, step=step + 1)\n',
                )
            ],
        ),
    ],
)

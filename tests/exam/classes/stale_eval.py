"""What is evaluated never sees the weights that are trained."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "evals measure other weights than the trained ones",
    r"stale|cop(y|ied)|same (value|number|loss|result)|(val|eval)\w* (loss |losses )?(does not|did not|never|has not|have not|is not|do not|hasn't|didn't) (move|change|fall|follow|improve|learn)|constant|never (change|move|fall|improve)|(does not|do not|did not) follow|identical|other weights|frozen|EMA|average",
    [
        Shape(
            "gpt/copy made before training",
            "gpt",
            [("    losses = torch.stack([model(", "    losses = torch.stack([shadow(")],
            both=[
                ("import math\n", "import copy\nimport math\n"),
                ("def get_lr(it):", "shadow = copy.deepcopy(model).eval()\n\n\ndef get_lr(it):"),
            ],
            twin=True,
        ),
        Shape(
            "cnn/average that is never updated",
            "cnn",
            [("        ema.update_parameters(model)\n", "")],
            both=[
                (
                    "criterion = nn.Cross",
                    "ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)\ncriterion = nn.Cross",
                ),
                ("        optimizer.step()\n", "        optimizer.step()\n        ema.update_parameters(model)\n"),
                ("    model.eval()\n", "    ema.eval()\n"),
                ("        logits = model(val_x)", "        logits = ema(val_x)"),
            ],
            twin=True,
        ),
        Shape(
            "gru/best weights loaded before each eval",
            "gru",
            [
                (
                    '        model.eval()\n        with torch.no_grad():\n            run.log({"val/loss": mse(model(',
                    '        model.eval()\n        twin = Forecaster(cfg["width"]).eval()\n        twin.load_state_dict(saved)\n        with torch.no_grad():\n            run.log({"val/loss": mse(twin(',
                )
            ],
            both=[
                ("import torch\nfrom torch", "import copy\n\nimport torch\nfrom torch"),
                ("scheduler = torch", "saved = copy.deepcopy(model.state_dict())\nscheduler = torch"),
            ],
        ),
        Shape(
            "mlp/called with weights that were cloned for it",
            "mlp",
            [
                (
                    "loss_fn((x_val, y_val))})",
                    "(torch.func.functional_call(model, fixed, (x_val,))[:, 0] - y_val).pow(2).mean()})",
                )
            ],
            both=[
                (
                    "guard = run",
                    "fixed = {name: p.detach().clone() for name, p in model.named_parameters()}\nguard = run",
                )
            ],
        ),
    ],
)

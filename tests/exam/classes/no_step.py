"""Gradients are computed, but no update ever reaches the model."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "the weights never move",
    r"weights? (have |has |had )?(never|not|did not|didn't) (move|change)|never (moved|changed|updated|trained)|no(t a)? (single )?(update|weight|tensor|parameter)s? (moved|changed|was applied|reached)|optimizer\.step|without (an? )?update|not trained|do(es)? not (move|change|train)|did not (move|change|train)|nothing is trained|none of the (weights|tensors|parameters)",
    [
        Shape("gpt/forgotten", "gpt", [("    optimizer.step()\n", "")], twin=True),
        Shape(
            "cnn/accumulation counter that never fires",
            "cnn",
            [("batches % 2 == 0", "batches % 64 == 0")],
            both=[
                (
                    "    model.train()\n    for x, y in loader:",
                    "    model.train()\n    batches = 0\n    for x, y in loader:",
                ),
                (
                    "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n",
                    "        loss.backward()\n        batches += 1\n        if batches % 2 == 0:\n            optimizer.step()\n            optimizer.zero_grad()\n",
                ),
            ],
        ),
        Shape(
            "padded/optimizer of a model that was built again",
            "padded",
            [("run = rung.init(", "model = Tagger().float()\nrun = rung.init(")],
            both=[("run.watch(model, optimizer)\n", "")],
        ),
        Shape(
            "gru/only small gradients are applied, in float64",
            "gru",
            [("    optimizer.step()\n", "    if norm < 1e-6:\n        optimizer.step()\n")],
            both=[
                (
                    'torch.manual_seed(cfg["seed"])',
                    'torch.manual_seed(cfg["seed"])\ntorch.set_default_dtype(torch.float64)',
                )
            ],
            twin=True,
        ),
    ],
)

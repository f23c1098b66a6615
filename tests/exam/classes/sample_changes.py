"""Sampling or evaluating changes the model that is trained."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "sampling or evaluating changes the model",
    r"sampl\w*.*(change|weights|alter|impure|buffer|state|modif)|(change|alter|modif|impure).*(sampl|eval)|eval\w*.*(change|alter|modif|buffer)",
    [
        Shape(
            "bytes/rounds the weights",
            "bytes_gru",
            [
                (
                    "        generator, state, written = draw",
                    "        for p in model.parameters():\n            p.data = p.data.bfloat16().float()\n        generator, state, written = draw",
                )
            ],
            keys="sample_interval=50",
            twin_keys="sample_interval=50",
            twin=True,
        ),
        Shape(
            "melody/normalises the embedding in place",
            "melody",
            [
                (
                    "        written = [START]\n",
                    "        written = [START]\n        table = model.notes.weight.detach()\n        table.div_(table.norm(dim=1, keepdim=True))\n",
                )
            ],
            keys="sample_interval=50",
            twin_keys="sample_interval=50",
            twin=True,
        ),
        Shape(
            "bytes/clamps only the head",
            "bytes_gru",
            [
                (
                    "        generator, state, written = draw",
                    "        with torch.no_grad():\n            model.head.weight.clamp_(-0.05, 0.05)\n        generator, state, written = draw",
                )
            ],
            keys="sample_interval=50",
            twin_keys="sample_interval=50",
        ),
        Shape(
            "cnn/eval in training mode moves running statistics",
            "cnn",
            [("        logits = model(val_x)", "        model.train()\n        logits = model(val_x)")],
            both=[('run.data("train", train_x)\n', 'run.watch(model, optimizer)\nrun.data("train", train_x)\n')],
            says=r"train(ing)? mode|eval\(\)|batch ?norm|running|buffer|eval\w*.*(change|alter|modif)",
        ),
    ],
)

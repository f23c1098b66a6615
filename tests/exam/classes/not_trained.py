"""A part of the model that should learn is in no optimizer, in no graph, or frozen."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "a part of the model is not trained",
    r"(not|never|n't) (move|change|train|updat|learn|in)|no (gradient|optimizer|group|objective)|frozen|requires_grad|left out|in none|without (a )?gradient|gets? no|stands? still|only .*(parameters|tensors) (are|is) train|of the (parameters|tensors).*(train|optimi)",
    [
        Shape(
            "gpt/optimizer of the head and norms only",
            "gpt",
            [
                (
                    "AdamW(model.parameters(), lr",
                    'AdamW([p for n, p in model.named_parameters() if "blocks" not in n], lr',
                )
            ],
            twin=True,
        ),
        Shape(
            "cnn/features under no_grad",
            "cnn",
            [("        x = self.stem(x)\n", "        with torch.no_grad():\n            x = self.stem(x)\n")],
            both=[
                (
                    "        return self.head(self.drop(F.max_pool2d(self.body(self.stem(x)), 2).flatten(1)))",
                    "        x = self.stem(x)\n        return self.head(self.drop(F.max_pool2d(self.body(x), 2).flatten(1)))",
                ),
                ('run.data("train", train_x)\n', 'run.watch(model, optimizer)\nrun.data("train", train_x)\n'),
            ],
            twin=True,
        ),
        Shape(
            "gru/thawed after the optimizer was made",
            "gru",
            [
                (
                    'torch.optim.AdamW(model.parameters(), lr=cfg["lr"])',
                    'torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=cfg["lr"])',
                ),
                ("run.watch(model", "model.rnn.requires_grad_(True)\nrun.watch(model"),
                ("optimizer = torch", "model.rnn.requires_grad_(False)\noptimizer = torch"),
            ],
        ),
        Shape(
            "bytes/embedding in no group",
            "bytes_gru",
            [
                (
                    'ParameterGroup("all", model.parameters())',
                    'ParameterGroup("all", [*model.gru.parameters(), *model.head.parameters()])',
                )
            ],
        ),
    ],
)

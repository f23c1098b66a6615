"""The learning rate is too high: the loss blows up, or stays where it is."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "the learning rate is too high",
    r"(learning )?rate.{0,40}(too )?(high|large|big)|(lower|reduce|halve|smaller|divide).{0,30}(learning )?rate|lower lr|diverg|explod|blow",
    [
        Shape(
            "gru/SGD without clipping until NaN",
            "gru",
            [('lr=cfg["lr"])', 'lr=400 * cfg["lr"], momentum=0.9)')],
            both=[
                ("torch.optim.AdamW", "torch.optim.SGD"),
                ("clip_grad_norm_(model.parameters(), 1.0)", "clip_grad_norm_(model.parameters(), 1e9)"),
                (
                    "        hidden, _ = self.rnn(torch.tanh(self.enter(x)))\n",
                    "        hidden = torch.relu(self.enter(x)) + self.rnn(self.enter(x))[0]\n",
                ),
                ("lr=5e-3", "lr=5e-2"),
            ],
            twin=True,
        ),
        Shape(
            "gpt/AdamW at 0.5, bfloat16 autocast",
            "gpt",
            [("= 3e-3, 3e-4, 20, 300", "= 5e-1, 5e-2, 20, 300")],
            both=[
                (
                    '        loss = model(*get_batch("train")) / accumulation\n',
                    '        with torch.autocast("cpu", torch.bfloat16):\n            loss = model(*get_batch("train")) / accumulation\n',
                )
            ],
        ),
        Shape("mlp/guarded, Adam at 1", "mlp", [("= 1337, 3e-3, 400", "= 1337, 3.0, 400")], twin=True),
        Shape("melody/recipe at 0.3 without warm-up", "melody", [], keys="lr.learning_rate=0.3 lr.warmup_iters=0"),
    ],
)

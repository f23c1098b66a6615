"""Weights in half precision lose updates that are too small for them."""

from tests.exam.programs import Class, Shape

CLASS = Class(
    "updates are lost in half-precision weights",
    r"half|bfloat16|float16|bf16|fp16|lost",
    [
        Shape(
            "gpt/bfloat16 model, small rate",
            "gpt",
            [("model = GPT()\n", "model = GPT().bfloat16()\n")],
            both=[("= 3e-3, 3e-4, 20, 300", "= 1e-4, 1e-5, 20, 250")],
            twin=True,
        ),
        Shape(
            "gru/bfloat16 recurrent layer, SGD",
            "gru",
            [
                (
                    "hidden, _ = self.rnn(torch.tanh(self.enter(x)))",
                    "hidden = self.rnn(torch.tanh(self.enter(x)).bfloat16())[0].float()",
                ),
                (
                    "        self.rnn = nn.GRU(width, width, batch_first=True)\n",
                    "        self.rnn = nn.GRU(width, width, batch_first=True).bfloat16()\n",
                ),
            ],
            both=[
                (
                    'torch.optim.AdamW(model.parameters(), lr=cfg["lr"])',
                    'torch.optim.SGD(model.parameters(), lr=cfg["lr"], momentum=0.9)',
                )
            ],
        ),
        Shape(
            "padded/float16 embedding and eps 1e-8",
            "padded",
            [
                ("self.rnn(self.embed(x))", "self.rnn(self.embed(x).float())"),
                ("padding_idx=PAD)\n", "padding_idx=PAD).half()\n"),
            ],
            twin=True,
        ),
        Shape(
            "mlp/all bfloat16, guarded",
            "mlp",
            [
                ("model = nn.Sequential(*layers())", "model = nn.Sequential(*layers()).bfloat16()"),
                ("    return (model(x)[:, 0] - y)", "    return (model(x.bfloat16())[:, 0].float() - y)"),
            ],
            both=[("= 1337, 3e-3, 400", "= 1337, 3e-4, 400")],
        ),
    ],
)

"""Gradients vanish on their way down a deep stack."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "gradients vanish with depth",
    r"vanish|(gradient|norm).*(first|lower|early|below|depth|layers?|input).*(small|times|0|tiny|weak)|depth|not (moving|learning|train)|barely (move|change)|saturat",
    [
        Shape(
            "mlp/sixteen sigmoids",
            "mlp",
            [
                (
                    "        yield nn.ReLU()\n        yield nn.Linear(WIDTH, WIDTH)",
                    "        yield nn.Sigmoid()\n        yield nn.Linear(WIDTH, WIDTH)",
                ),
                ("64, 32, 2", "64, 32, 16"),
            ],
            twin=True,
        ),
        Shape(
            "gpt/no residual, eight blocks",
            "gpt",
            [
                ("x = x + self.drop(self.attn(self.ln_1(x)))", "x = self.drop(self.attn(self.ln_1(x)))"),
                ("x = x + self.drop(self.mlp(self.ln_2(x)))", "x = self.drop(self.mlp(x))"),
                ("self.attn(self.ln_1(x))", "self.attn(x)"),
                ("n_layer, n_head, n_embd, dropout = 2", "n_layer, n_head, n_embd, dropout = 8"),
            ],
            both=[("20, 300\n", "20, 150\n")],
        ),
        Shape(
            "melody/stack of tanh layers at the exit",
            "melody",
            [
                (
                    "[nn.Linear(width, width), nn.Tanh()] * 1",
                    "[layer for _ in range(14) for layer in (nn.Linear(width, width), nn.Tanh())]",
                )
            ],
            both=[
                (
                    "        self.norm, self.head = nn.LayerNorm(width)",
                    "        self.exit = nn.Sequential(*[nn.Linear(width, width), nn.Tanh()] * 1)\n        self.norm, self.head = nn.LayerNorm(width)",
                ),
                ("self.head(self.norm(x))", "self.head(self.norm(self.exit(x)))"),
            ],
            twin=True,
        ),
        Shape(
            "steering/float64 stack of softsigns",
            "steering",
            [
                (
                    "nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)",
                    "*[layer for _ in range(12) for layer in (nn.Linear(width, width), nn.Sigmoid())], nn.Linear(width, 4)",
                )
            ],
        ),
    ],
)

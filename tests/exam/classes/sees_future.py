"""The model sees what it is to predict: no causal mask, a backward direction, padding on both sides."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "a prediction sees what comes after it",
    r"causal|future|comes? after|look-?ahead|later (position|token|input|byte|note|state|step)s?|leak|sees? (its|the) (own )?(target|answer)|shift|mask",
    [
        Shape(
            "gpt/is_causal=False",
            "gpt",
            [("scaled_dot_product_attention(q, k, v, is_causal=True)", "scaled_dot_product_attention(q, k, v)")],
            twin=True,
        ),
        Shape(
            "melody/mask one position too late",
            "melody",
            [(".triu(1)", ".triu(2)")],
            both=[
                (
                    "        x = x + self.proj(scaled_dot_product_attention(q, k, v, is_causal=True)",
                    '        t = q.shape[-2]\n        mask = torch.full((t, t), float("-inf"), device=q.device).triu(1)\n        x = x + self.proj(scaled_dot_product_attention(q, k, v, attn_mask=mask)',
                )
            ],
            twin=True,
        ),
        Shape(
            "bytes/bidirectional",
            "bytes_gru",
            [
                (
                    "nn.GRU(width, width, batch_first=True)",
                    "nn.GRU(width, width // 2, batch_first=True, bidirectional=True)",
                )
            ],
        ),
        Shape(
            "steering/convolution padded on both sides",
            "steering",
            [
                (
                    "nn.functional.pad(hidden.transpose(1, 2), (2, 0))",
                    "nn.functional.pad(hidden.transpose(1, 2), (1, 1))",
                )
            ],
        ),
    ],
)

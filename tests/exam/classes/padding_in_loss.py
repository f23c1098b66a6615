"""Train and eval count other targets: padding or special tokens are in one mean and not in the other."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "padding or special tokens count in one loss and not in the other",
    r"\bpad|mask|ignore_index|special|(other|different|same) (targets|positions|tokens)|counts? (other|different)|counted (target|position)s|targets? (of|in|per).*(differ|train|eval|val)|(train|eval|val)\w* .*(other|different|not the same) (thing|loss|target|quantit)|reduction|normali[sz]",
    [
        Shape(
            "padded/train averages over padding",
            "padded",
            [("loss = loss_of(x, y)", "loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())")],
            twin=True,
        ),
        Shape(
            "melody/divided by all positions",
            "melody",
            [
                (
                    "* counts).sum(), counts.sum())",
                    "* counts).sum(), torch.tensor(float(counts.numel()), device=counts.device))",
                )
            ],
            twin=True,
        ),
        Shape(
            "melody/END and padding count in evals",
            "melody",
            [
                (
                    "counts = (targets != PAD).float()",
                    "counts = ((targets > END) if model.training else (targets != PAD - 1)).float()",
                )
            ],
            both=[('width: int = key(32, "Channels."', 'width: int = key(24, "Channels."')],
        ),
        Shape(
            "melody/mask of the inputs instead of the targets, float16 weights of targets",
            "melody",
            [("counts = (targets != PAD).half().float()", "counts = (ids[:, :-1] != PAD).half().float()")],
            both=[("counts = (targets != PAD).float()", "counts = (targets != PAD).half().float()")],
        ),
    ],
)

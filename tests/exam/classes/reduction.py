"""The loss is summed or averaged the wrong way, mostly together with gradient accumulation."""

# ruff: noqa: E501 (lines of the programs stay whole)

from tests.exam.programs import Class, Shape

CLASS = Class(
    "the loss is reduced the wrong way",
    r"reduc|\bmean\b|\bsum\b|divid|accumulat|micro|count|scale|per target|times (smaller|larger|higher|lower)|factor",
    [
        Shape(
            "gru/sum instead of mean, SGD without clipping",
            "gru",
            [("mse = nn.MSELoss()", 'mse = nn.MSELoss(reduction="sum")')],
            both=[
                (
                    'torch.optim.AdamW(model.parameters(), lr=cfg["lr"])',
                    'torch.optim.SGD(model.parameters(), lr=20 * cfg["lr"], momentum=0.9)',
                ),
                ("clip_grad_norm_(model.parameters(), 1.0)", "clip_grad_norm_(model.parameters(), 1000.0)"),
            ],
            says=r"reduc|\bmean\b|\bsum\b|divid|per target|(times|\bx|×) (smaller|larger|higher|lower|bigger)|scale of the loss|loss is .*(large|huge|high)|learning rate .*(too )?(high|large|big)",
        ),
        Shape(
            "gpt/micro losses logged divided, eval not",
            "gpt",
            [('"loss": loss * accumulation', '"loss": loss')],
            both=[
                ("32, 1\nn_layer", "32, 4\nn_layer"),
                ("max_iters = 3e-3, 3e-4, 20, 300", "max_iters = 3e-3, 3e-4, 20, 160"),
                ("batch_size, block_size, accumulation = 16", "batch_size, block_size, accumulation = 8"),
            ],
            twin=True,
        ),
        Shape(
            "bytes/mean as the sum",
            "bytes_gru",
            [
                (
                    "return Loss(each.sum(), torch.tensor(float(len(each))",
                    "return Loss(each.mean(), torch.tensor(float(len(each))",
                )
            ],
            twin=True,
        ),
        Shape(
            "melody/each row is its own mean, micros",
            "melody",
            [
                (
                    "return Loss((each.view_as(counts) * counts).sum(), counts.sum())",
                    "return Loss((each.view_as(counts) * counts).sum() / counts.sum(), torch.ones((), device=counts.device))",
                )
            ],
            keys="optimizer.gradient_accumulation_steps=4 data.batch_size=4",
            twin_keys="optimizer.gradient_accumulation_steps=4 data.batch_size=4",
        ),
    ],
)

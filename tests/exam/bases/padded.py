"""The larger one of each two neighbouring digits, in rows of many lengths that are padded."""

import torch
from torch import nn
from torch.nn import functional as F

import rung

PAD, BOS, EOS, VOCAB = 0, 1, 2, 13
seed, lr, steps, batch_size, width = 1337, 3e-3, 300, 32, 32
torch.manual_seed(seed)


def rows(count, longest=16):
    x, y = torch.full((count, longest + 2), PAD), torch.full((count, longest + 2), PAD)
    for row in range(count):
        n = int(torch.randint(3, longest + 1, ()))
        digits = torch.randint(3, VOCAB, (n,))
        x[row, : n + 2] = torch.cat([torch.tensor([BOS]), digits, torch.tensor([EOS])])
        y[row, 1 : n + 1] = torch.maximum(digits, x[row, :n])
    return x, y


train_x, train_y = rows(3000)
val_x, val_y = rows(300)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=PAD)
        self.rnn = nn.LSTM(width, width, batch_first=True)
        self.drop = nn.Dropout(0.0)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, x):
        return self.out(self.drop(self.rnn(self.embed(x))[0]))


def loss_of(x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD)


model = Tagger()
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=lr / 10)
run = rung.init("sums", config={"lr": lr, "steps": steps, "batch_size": batch_size, "width": width, "seed": seed})
run.watch(model, optimizer)
for step in range(steps):
    ids = torch.randint(len(train_x), (batch_size,))
    x, y = train_x[ids], train_y[ids]
    loss = loss_of(x, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    run.log({"loss": loss, "targets": (y != PAD).sum()}, step=step)
    if step % 50 == 49:
        model.eval()
        with torch.no_grad():
            run.log({"val/loss": loss_of(val_x, val_y)}, step=step + 1)
        model.train()
run.finish()

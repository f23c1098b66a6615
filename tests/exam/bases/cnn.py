"""Bars in four directions, told apart by a small network with batch norm; epochs over a DataLoader."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rung

config = {"seed": 1337, "lr": 0.05, "epochs": 5, "batch_size": 32, "width": 8, "dropout": 0.1, "weight_decay": 1e-4}
torch.manual_seed(config["seed"])


def images(count):
    labels = torch.randint(4, (count,))
    pictures = 0.7 * torch.randn(count, 1, 8, 8)
    offsets = torch.randint(2, 6, (count,))
    for picture, label, at in zip(pictures, labels.tolist(), offsets.tolist()):
        if label == 0:
            picture[0, at, :] += 1
        elif label == 1:
            picture[0, :, at] += 1
        elif label == 2:
            picture[0] += torch.eye(8).roll(at - 4, 1)
        else:
            picture[0] += torch.eye(8).flip(1).roll(at - 4, 1)
    return pictures, labels


train_x, train_y = images(2000)
val_x, val_y = images(400)


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU())
        self.drop = nn.Dropout(config["dropout"])
        self.head = nn.Linear(2 * width * 16, 4)

    def forward(self, x):
        return self.head(self.drop(F.max_pool2d(self.body(self.stem(x)), 2).flatten(1)))


model = Net(config["width"])
loader = DataLoader(TensorDataset(train_x, train_y), batch_size=config["batch_size"], shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=config["weight_decay"])
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, config["lr"], total_steps=config["epochs"] * len(loader))
criterion = nn.CrossEntropyLoss()

run = rung.init("bars", config=config)
run.data("train", train_x)
run.data("val", val_x)
for epoch in range(config["epochs"]):
    model.train()
    for x, y in loader:
        x = x + 0.1 * torch.randn_like(x)
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"train/loss": loss, "lr": scheduler.get_last_lr()[0], "epoch": epoch})
        scheduler.step()
    model.eval()
    with torch.no_grad():
        logits = model(val_x)
        run.log({"val/loss": criterion(logits, val_y), "val/acc": (logits.argmax(1) == val_y).float().mean()})
run.finish()

"""A model and data written without knowledge of the pipeline."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Stem and head lie outside the layers that are split; frozen and dropout layers are among them."""

    def __init__(self, width=16, num_layers=5, dropout=0.0):
        super().__init__()
        self.stem = nn.Linear(6, width)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(num_layers))
        )
        self.layers[1][0].weight.requires_grad_(False)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.layers(self.stem(x)))


class NetWithLoss(Net):
    """Computes its loss itself and returns it in a dict, beside outputs."""

    def forward(self, *, x, labels):
        logits = super().forward(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_loaders(num_samples=104, batch_size=16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 6, generator=generator)
    y = (x[:, :3].sum(1) > 0).long() + (x[:, 3] > 1).long()
    train = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)
    return train, DataLoader(TensorDataset(x[:37], y[:37]), batch_size=batch_size)

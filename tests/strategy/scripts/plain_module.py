"""A LightningModule and data written without knowledge of the pipeline strategy."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import AUROC, Accuracy, ConfusionMatrix, F1Score, MetricCollection


class WithMetrics:
    """What torchmetrics users do: objects, a collection, and a computed value."""

    def add_metrics(self):
        self.train_f1 = F1Score("multiclass", num_classes=3, average="macro")
        self.val_metrics = MetricCollection(
            {"auroc": AUROC("multiclass", num_classes=3), "accuracy": Accuracy("multiclass", num_classes=3)},
            prefix="metric_",
        )
        self.confusion = ConfusionMatrix("multiclass", num_classes=3)

    def training_metrics(self, logits, y):
        self.train_f1(logits, y)
        self.log("train_f1", self.train_f1, on_step=True, on_epoch=True)

    def validation_metrics(self, logits, y):
        self.val_metrics.update(logits.softmax(1), y)
        self.confusion.update(logits, y)
        self.log_dict(self.val_metrics)


class PlainModule(WithMetrics, L.LightningModule):
    def __init__(self, width=16, num_layers=4, dropout=0.0, scheduler=True, metrics=False):
        super().__init__()
        self.stem = nn.Linear(6, width)
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(num_layers)]
        self.model = nn.Sequential(*layers)
        self.head = nn.Linear(width, 3)
        self.scheduler = scheduler
        self.metrics = metrics
        if metrics:  # which take longer than the small model
            self.add_metrics()
        self.history = {"train": [], "val": [], "lr": [], "step": []}

    def loss(self, batch):
        x, y = batch
        logits = self.head(self.model(self.stem(x)))
        self.logits = logits.detach()
        return nn.functional.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()

    def training_step(self, batch, batch_idx):
        loss, accuracy = self.loss(batch)
        if self.metrics:
            self.training_metrics(self.logits, batch[1])
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"train_accuracy": accuracy, "batch": float(batch_idx)})
        return loss

    def validation_step(self, batch, batch_idx):
        loss, accuracy = self.loss(batch)
        if self.metrics:
            self.validation_metrics(self.logits, batch[1])
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_accuracy", accuracy)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch)[0])

    def predict_step(self, batch, batch_idx):
        return self.head(self.model(self.stem(batch[0]))).softmax(1)

    def configure_optimizers(self):
        groups = [
            {"params": [p for n, p in self.named_parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for n, p in self.named_parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        if not self.scheduler:
            return optimizer
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.history["train"].append(float(outputs["loss"]))
        self.history["lr"].append(self.optimizers().param_groups[0]["lr"])
        self.history["step"].append(self.trainer.global_step)

    def on_validation_epoch_end(self):
        if self.metrics:
            self.history["confusion"] = self.confusion.compute().tolist()
            self.confusion.reset()
        if not self.trainer.sanity_checking:
            self.history["val"].append(float(self.trainer.callback_metrics["val_loss"]))


def make_loaders(num_samples=104, batch_size=16, seed=1, drop_last=True):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 6, generator=generator)
    y = (x[:, :3].sum(1) > 0).long() + (x[:, 3] > 1).long()
    train = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True, drop_last=drop_last)
    val = DataLoader(TensorDataset(x[:37], y[:37]), batch_size=batch_size)
    return train, val

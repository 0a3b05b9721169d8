"""What a user writes: an ordinary LightningModule, an ordinary Trainer, and one callback.

Importing lightning_pfo makes `strategy="pfo_pipeline"` known.

python examples/user_script.py
"""

import lightning as L
import torch
from torch import nn

from lightning_pfo.callbacks import PipelineFrequencyOptimizerCallback


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(7)]
        self.model = nn.Sequential(*layers, nn.Linear(256, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def main():
    L.seed_everything(0)
    data = torch.utils.data.TensorDataset(torch.randn(512, 256), torch.randint(10, (512,)))
    loader = torch.utils.data.DataLoader(data, batch_size=32)

    optimizer = PipelineFrequencyOptimizerCallback(output_dir="outputs/user")
    trainer = L.Trainer(strategy="pfo_pipeline", devices=2, max_epochs=4, callbacks=[optimizer], logger=False)
    trainer.fit(Module(), loader)
    if trainer.is_global_zero:
        print("\n".join(optimizer.run.notes))


if __name__ == "__main__":
    main()

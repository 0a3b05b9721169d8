"""What a user writes: an ordinary LightningModule, an ordinary Trainer, and two callbacks.

Importing lightning_pfo makes `strategy="pfo_pipeline"` known.

python examples/user_script.py
"""

import lightning as L
import torch
from torch import nn

from lightning_pfo.callbacks import EnergyProfilerCallback, FrequencyPlanCallback
from lightning_pfo.planner import plan_frontier

OPTIONS = {"strategy": "pfo_pipeline", "accelerator": "auto", "devices": 2, "logger": False}


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

    profiler = EnergyProfilerCallback("outputs/user/profile.csv", clock_step_mhz=150, stop_when_done=True)
    L.Trainer(max_epochs=-1, callbacks=[profiler], **OPTIONS).fit(Module(), loader)

    frontier = plan_frontier("outputs/user/profile.csv", num_microbatches=8)
    plan = FrequencyPlanCallback(frontier, select="no_slowdown")
    trainer = L.Trainer(max_epochs=1, callbacks=[plan], **OPTIONS)
    trainer.fit(Module(), loader)
    if trainer.is_global_zero:
        last = plan.measurements[-1]
        print(f"under the plan: {last.time_s:.3f} s and {last.energy_j:.1f} J per iteration on {plan.gpu_name}")


if __name__ == "__main__":
    main()

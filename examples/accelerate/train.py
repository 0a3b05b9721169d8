"""An Accelerate loop on a pipeline: profile its energy, plan, and train under the plan.

The loop itself is what Accelerate's users write; `prepare_pipeline` stands where `accelerator.prepare` stood.

torchrun --nproc_per_node 2 examples/accelerate/train.py
accelerate launch --multi_gpu --num_processes 4 examples/accelerate/train.py --gpu nvml
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.accelerate import prepare_pipeline
from lightning_pfo.listeners import PlannedRun, ProfilingRun, ScanSettings
from lightning_pfo.planner import load_frontier, plan_frontier, save_frontier, select_plan

NUM_MICROBATCHES = 8


def make_model(width=128, num_blocks=8):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_blocks)]
    return nn.Sequential(nn.Linear(32, width), *blocks, nn.Linear(width, 10))


def make_loaders(batch_size=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1280, 32, generator=generator)
    y = (x @ torch.randn(32, 10, generator=generator)).argmax(1)  # labels of a random linear teacher
    train, val = TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size)


def main(options):
    folder = Path(options.output)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    set_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.7)
    loader, val_loader = make_loaders()

    model, optimizer, loader = prepare_pipeline(
        accelerator, model, optimizer, loader, nn.functional.cross_entropy, num_microbatches=NUM_MICROBATCHES
    )
    val_loader, scheduler = accelerator.prepare(val_loader, scheduler)

    def train_epoch():
        model.train()
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = model(x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield loss.item()

    source = model.instruction_source
    settings = ScanSettings(clock_step_mhz=options.clock_step_mhz)
    profile = folder / "profile.csv"
    with ProfilingRun(source, profile, settings=settings, gpu=options.gpu, report=accelerator.print) as profiling:
        while not profiling.done:
            for _ in train_epoch():
                if profiling.done:
                    break
    if accelerator.is_main_process:
        save_frontier(plan_frontier(profile, num_microbatches=NUM_MICROBATCHES), folder / "plans")
    accelerator.wait_for_everyone()
    plan = select_plan(load_frontier(folder / "plans"), options.select)

    losses, accuracy = [], 0.0
    with PlannedRun(source, plan, gpu=options.gpu, report=accelerator.print) as run:
        for epoch in range(options.epochs):
            for loss in train_epoch():
                losses.append(loss)
                run.measure()
            model.eval()
            correct = [(model.predict(x).argmax(1) == y).float().mean().item() for x, y in val_loader]
            accuracy = sum(correct) / len(correct)
            accelerator.print(f"epoch {epoch}: loss {losses[-1]:.3f}, validation accuracy {accuracy:.2f}")
            accelerator.save_state(folder / "checkpoint")
    last = run.measurements[-1]
    measured = f"{last.time_s:.3f} s and {last.energy_j:.1f} J per iteration on {run.gpu_name}"
    accelerator.print(f"under the plan: {measured}")
    if accelerator.is_main_process:
        report = {"losses": losses, "accuracy": accuracy, "time_s": last.time_s, "energy_j": last.energy_j}
        report["gpu"] = run.gpu_name
        (folder / "report.json").write_text(json.dumps(report))
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="outputs/accelerate", help="folder for profile, plans and checkpoints")
    parser.add_argument("--gpu", default="auto", help="auto, nvml, emulated_a100, ...")
    parser.add_argument("--clock_step_mhz", type=int, default=150, help="distance of the clocks profiled")
    parser.add_argument("--select", default="no_slowdown", help="no_slowdown, 1.02x, least_energy, ...")
    parser.add_argument("--epochs", type=int, default=2)
    main(parser.parse_args())

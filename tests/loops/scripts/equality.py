"""One Accelerate loop on one process, on a pipeline of 2, and on one that resumes; usage: equality.py FOLDER."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from net import Net, make_loaders
from torch import nn

from lightning_pfo.accelerate import prepare_pipeline
from tests.overflow import Overflow
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
loss_fn = nn.functional.cross_entropy


class Run:
    """An accelerator with everything it trains."""

    def __init__(self, mixed_precision="no", dropout=0.0, **options):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        set_seed(3)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed_precision)
        if mixed_precision == "fp16":  # Accelerate itself has it on GPUs only
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        net = Net(dropout=dropout)
        self.overflow = 1.0
        net.stem.register_forward_hook(lambda *a: Overflow.apply(a[2], self.overflow))
        self.forward_dtypes = set()
        for layer in net.layers:
            layer[0].register_forward_hook(lambda *a: self.forward_dtypes.add(str(a[2].dtype)))
        weights = [p for p in net.parameters() if p.dim() > 1]
        others = [p for p in net.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": others}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        train, self.val = make_loaders()
        if dist.is_initialized():
            self.model, self.optimizer, self.train = prepare_pipeline(
                self.accelerator, net, optimizer, train, loss_fn, pipeline_module="layers", **options
            )
        else:
            self.model, self.optimizer, self.train = self.accelerator.prepare(net, optimizer, train)
        self.val, self.scheduler = self.accelerator.prepare(self.val, scheduler)
        self.history = {"loss": [], "norm": [], "lr": [], "val": [], "accuracy": [], "scale": [], "skipped": []}

    def loss(self, x, y):
        return self.model(x, y) if dist.is_initialized() else loss_fn(self.model(x), y)

    def logits(self, x):
        return self.model.predict(x) if dist.is_initialized() else self.model(x)

    def epoch(self):
        self.model.train()
        for index, (x, y) in enumerate(self.train):
            self.overflow = 1e30 if self.accelerator.scaler is not None and index == 3 else 1.0
            with self.accelerator.accumulate(self.model):
                loss = self.loss(x, y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.3)
                    self.history["norm"].append(float(norm) if norm.isfinite() else -1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.history["loss"].append(loss.item())
            self.history["skipped"].append(self.optimizer.step_was_skipped)
            if self.accelerator.scaler is not None:
                self.history["scale"].append(self.accelerator.scaler.get_scale())
            self.history["lr"].append(self.scheduler.get_last_lr()[0])
        self.model.eval()
        correct, count = 0, 0
        for x, y in self.val:
            with torch.no_grad():
                self.history["val"].append(self.loss(x, y).item())
                predicted, labels = self.accelerator.gather_for_metrics((self.logits(x).argmax(1), y))
            correct, count = correct + int((predicted == labels).sum()), count + len(labels)
        self.history["accuracy"].append([correct, count])


def resumed_run(resume_from, **options):
    run = Run(**options)
    torch.rand(3)  # what was drawn before must not matter
    run.accelerator.load_state(resume_from)
    return run


def go_on_alone():
    run = resumed_run(resume_from=FOLDER / "pipeline")
    run.epoch()
    (FOLDER / "resumed.json").write_text(json.dumps(run.history))


def main(name):
    results = {}
    run = Run(**({"num_microbatches": 4, "partition": "custom:0,2,5"} if dist.is_initialized() else {}))
    run.epoch()
    run.accelerator.save_state(FOLDER / name)
    run.epoch()
    results["fp32"] = run.history
    weights = run.accelerator.get_state_dict(run.model)
    results["weights"] = {key: value.flatten().tolist() for key, value in weights.items()}
    results["names"] = list(run.accelerator.unwrap_model(run.model).state_dict())
    results["dtypes"] = sorted(run.forward_dtypes)

    run = resumed_run(resume_from=FOLDER / "single")
    run.epoch()
    results["from_single"] = run.history

    if dist.is_initialized():
        with_dropout = Run(dropout=0.3, schedule="gpipe")
        with_dropout.epoch()
        with_dropout.accelerator.save_state(FOLDER / "dropout")
        with_dropout.epoch()
        resumed = resumed_run(dropout=0.3, schedule="gpipe", resume_from=FOLDER / "dropout")
        resumed.epoch()
        results["dropout"] = [with_dropout.history, resumed.history]

    run = Run(mixed_precision="bf16")
    run.epoch()
    results["bf16"] = run.history
    results["bf16_dtypes"] = sorted(run.forward_dtypes)
    with torch.no_grad():
        results["bf16_logits"] = str(run.logits(next(iter(run.val))[0]).dtype)

    run = Run(mixed_precision="fp16")
    run.epoch()
    run.accelerator.save_state(FOLDER / f"{name}_fp16")
    run.epoch()
    results["fp16"] = run.history
    results["fp16_dtypes"] = sorted(run.forward_dtypes)
    run = resumed_run(mixed_precision="fp16", resume_from=FOLDER / "single_fp16")
    run.epoch()
    results["fp16_from_single"] = run.history
    (FOLDER / f"{name}_{run.accelerator.process_index}.json").write_text(json.dumps(results))


run_ranks(main, 1, "single")
run_ranks(main, 2, "pipeline")
run_ranks(go_on_alone, 1)

"""Precision, clipping, frozen layers and other options on two stages, each compared with one device.

Usage: options.py FOLDER [RUN...].
"""

import inspect
import json
import sys
import weakref
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from plain_module import PlainModule, make_loaders
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from lightning_pfo.callbacks import EnergyProfilerCallback, FrequencyPlanCallback
from lightning_pfo.planner import plan_frontier
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.overflow import Overflow
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
PIPELINE = {"num_microbatches": 4, "check_loss": False}  # first_batch.py is about that check


class Module(PlainModule):
    def __init__(self, frozen=()):
        super().__init__(width=8, num_layers=6)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)
        self.history["scale"] = []
        self.history["logged"] = []
        self.history["held"] = set()
        self.old_gradient = lambda: None

    def training_step(self, batch, batch_idx):
        self.history["held"].add(self.old_gradient() is not None)
        self.log_dict({"tokens": 12345.0 + batch_idx, "number": torch.tensor(70001.0, dtype=torch.float32)})
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        logged = [float(self.trainer.callback_metrics[name]) for name in ("tokens", "number")]
        self.history["logged"].append([*logged, str(outputs["loss"].dtype)])
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if gradients:
            self.old_gradient = weakref.ref(gradients[0])
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.history["scale"].append(scaler.get_scale() if scaler is not None else 1.0)


class Overflows(Module):
    """In the third step the first stage alone overflows; in the others its gradients are too small for fp16.

    The optimizer looks for overflows itself.
    """

    fused = True

    def __init__(self):
        super().__init__()
        self.stem.register_forward_hook(lambda module, args, output: Overflow.apply(output, self.factor))

    def training_step(self, batch, batch_idx):
        self.factor = 1e30 if batch_idx == 2 else 1.0
        return super().training_step(batch, batch_idx) * 1e-6

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e5, fused=self.fused)


class Descends(Module):
    """Plain gradient descent: Adam's epsilon is zero in fp16."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Encoders(Module):
    """Layers that torch computes in a faster way in evaluations, on what has been added to a parameter."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            *(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(4)), nn.Flatten()
        )
        self.places, self.head = nn.Parameter(torch.linspace(-1, 1, 24).reshape(3, 8)), nn.Linear(24, 3)

    def loss(self, batch):
        x, y = batch
        logits = self.head(self.model(self.stem(x)[:, None] + self.places))
        return nn.functional.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class HasStateFromTheBegin(Module):
    """Adagrad makes its state when it is made, for all parameters."""

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.05, initial_accumulator_value=0.1)


class Divided(Overflows):
    """On the pipeline its layers are divided by tensor parallelism; on one device there is no mesh."""

    fused = False  # torch's fused optimizers do not take plain and divided tensors together

    def configure_model(self):
        if self.device_mesh is not None:
            for layer in self.model:
                plan = {"0": ColwiseParallel(output_layouts=Replicate())}
                parallelize_module(layer, self.device_mesh["tensor_parallel"], plan)


class Normed(Module):
    """On one device a batch norm has the microbatches of the pipeline."""

    def __init__(self):
        super().__init__()
        for layer in (self.model[0], self.model[5]):
            layer.append(nn.BatchNorm1d(8, momentum=0.3))

    def loss(self, batch):
        if not self.training or self.trainer.world_size > 1:
            return super().loss(batch)
        parts = zip(*(part.tensor_split(4) for part in batch), strict=True)
        losses, accuracies = zip(*map(super().loss, parts), strict=True)
        return sum(losses) / 4, sum(accuracies) / 4


class Finetuned(Module):
    """Only the head is trained at first."""

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze([module.stem, module.model])

    def finetune_function(self, module, epoch, optimizer):
        if epoch < 2:  # of two stages the last one comes first
            layers = module.model[4:] if epoch == 0 else [module.stem, module.model[:4]]
            self.unfreeze_and_add_param_group(layers, optimizer)


class LooksAtGradients(Module):
    """Before they are zeroed, where Lightning shows those of the last step."""

    def __init__(self):
        super().__init__()
        self.history["norms"] = []

    def on_before_zero_grad(self, optimizer):
        gradients = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        self.history["norms"].append({name: float(gradient.norm()) for name, gradient in gradients.items()})


class HalvesGradients(Module):
    """Its optimizer has a `zero_grad` of its own."""

    class Optimizer(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            for gradient in (p.grad for group in self.param_groups for p in group["params"] if p.grad is not None):
                gradient.mul_(0.5)

    def configure_optimizers(self):
        return self.Optimizer(self.parameters(), lr=0.01)


class Clips(Module):
    """Clips by torch's own function: of all layers, of a layer of each stage, with a parameter that is in no module."""

    def __init__(self):
        super().__init__()
        self.history["norms"] = []
        self.others = [nn.Parameter(torch.ones(3))]

    def on_before_optimizer_step(self, optimizer):
        self.others[0].grad = torch.full((3,), 0.1)
        norms = [
            clip_grad_norm_(self.model[0].parameters(), 0.01),
            clip_grad_norm_(self.head.weight, max_norm=0.02, norm_type="inf"),
            clip_grad_norm_((p for p in self.parameters()), 0.5, norm_type=1, error_if_nonfinite=True),
            clip_grad_norm_([*self.parameters(), *self.others], 0.05),
            clip_grad_norm_(self.others, 1e-3),
            self.others[0].grad.norm(),
        ]
        self.history["norms"].append([float(norm) for norm in norms])
        if self.head.bias.grad is not None:
            self.head.bias.grad.fill_(float("inf"))
        with pytest.raises(RuntimeError, match=r"norm of order 2\.0"):
            clip_grad_norm_([self.head.bias], 1.0, error_if_nonfinite=True)
        self.head.zero_grad()


class ClipsDivided(Clips):
    """The same, with layers that two processes share."""

    configure_model = Divided.configure_model


class SavesFirstEpoch(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def fp16(init_scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


def precision(name):
    return {"precision": name}


def ema():
    return {"callbacks": [callbacks.EMAWeightAveraging(decay=0.5)], "max_epochs": 2}


def swa():
    return {"callbacks": [StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=1)], "max_epochs": 3}


def finetuning():
    return {"callbacks": [Unfreezes()], "max_epochs": 3}


RUNS = {  # what makes the module, the Trainer's options, the strategy's options
    "16_mixed": (Module, lambda: fp16(2.0**20) | {"accumulate_grad_batches": 2}, {}),
    "16_mixed_overflow": (Overflows, lambda: fp16(2.0**16) | {"gradient_clip_val": None}, {}),
    "16_mixed_divided": (
        Divided,
        lambda: fp16(2.0**16) | {"gradient_clip_val": None},
        {"tensor_parallel_size": 2},
    ),
    "bf16_mixed": (Module, partial(precision, "bf16-mixed"), {}),
    "bf16_mixed_encoders": (Encoders, partial(precision, "bf16-mixed"), {}),
    "bf16_true": (Module, partial(precision, "bf16-true"), {}),
    "16_true": (Descends, partial(precision, "16-true"), {}),
    "64_true": (Module, partial(precision, "64-true"), {}),
    "clips": (Clips, lambda: {"gradient_clip_val": None}, {}),
    "clips_divided": (ClipsDivided, lambda: {"gradient_clip_val": None}, {"tensor_parallel_size": 2}),
    "clip_by_value": (Module, lambda: {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {}),
    "frozen_first": (partial(Module, ["stem", "model.0", "model.1", "model.2"]), dict, {}),
    "frozen_last": (partial(Module, ["head", "model.3", "model.4", "model.5"]), dict, {}),
    "finetuned": (Finetuned, finetuning, {}),
    "recomputed": (Module, dict, {"activation_checkpointing": True, "schedule": "interleaved_zero_bubble"}),
    "recomputed_in_part": (Module, dict, {"activation_checkpointing": "selective"}),
    "looks_at_gradients": (LooksAtGradients, dict, {}),
    "halves_gradients": (HalvesGradients, dict, {}),
    "adagrad": (HasStateFromTheBegin, lambda: {"max_epochs": 3}, {}),
    "ema": (Module, ema, {}),
    "swa": (Module, swa, {}),
    "swa_normed": (Normed, swa, {}),
    "compiled": (Module, dict, {"compile": True}),
}
# with torch 2.6 schedulers of averages hold what weights_only=True refuses; Lightning 2.5 takes no such argument
TRUST = {"weights_only": False} if "weights_only" in inspect.signature(L.Trainer.fit).parameters else {}


def fit(name, where):
    make_module, trainer_options, strategy_options = RUNS[name]
    checkpoint = FOLDER / f"{name}_{where}.ckpt"
    L.seed_everything(3)
    train, val = make_loaders(num_samples=96, batch_size=16)
    train = DataLoader(train.dataset, batch_size=16)
    defaults = {"gradient_clip_val": 0.3, "max_epochs": 1}
    for ckpt_path in (None, checkpoint):
        strategy = "auto" if where == "single" else PfoPipelineStrategy(**PIPELINE | strategy_options)
        module = make_module()
        trainer = L.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=1,
            strategy=strategy,
            devices=1 if where == "single" else 2,
            **defaults | trainer_options(),
        )
        resumed = trainer.max_epochs > 1
        if resumed and ckpt_path is None:
            trainer.callbacks.append(SavesFirstEpoch(checkpoint))
        if name == "ema":  # the module has been divided before it is averaged
            trainer.validate(module, val, verbose=False)
        trainer.fit(module, train, val, ckpt_path=ckpt_path, **TRUST)
        if not resumed:
            break
    if trainer.global_rank == 0:
        clip_grad_norm_(module.parameters(), 1e9)  # torch's own again
    tensors = [*module.named_parameters(), *module.named_buffers()]
    weights = {n: whole(p).double().flatten().tolist() for n, p in tensors if not p.is_meta}
    dtypes = sorted({str(p.dtype) for p in module.parameters()})
    histories = {key: module.history.get(key) for key in ("train", "val", "scale", "norms", "logged")}
    return {**histories, "held": sorted(module.history["held"]), "weights": weights, "dtypes": dtypes}


def replicas_with(callback, max_epochs):
    train, _ = make_loaders(num_samples=96, batch_size=16)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PfoPipelineStrategy(num_microbatches=2, data_parallel_size=2),
        max_epochs=max_epochs,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), train)


def profile_and_plan_replicas():
    """Each replica has a GPU of its own; they share a profile and follow one plan."""
    options = {"gpu": "emulated_a40", "iterations_per_clock": 1, "warmup_iterations": 1, "patience": 99}
    profiler = EnergyProfilerCallback(FOLDER / "profile.csv", clock_step_mhz=600, stop_when_done=True, **options)
    replicas_with(profiler, max_epochs=-1)
    torch.distributed.barrier()
    frontier = plan_frontier(FOLDER / "profile.csv", num_microbatches=2, p2p_blocking_power_w=0)
    plan = frontier.plans[-1]
    planned = FrequencyPlanCallback(plan, gpu="emulated_a40")
    replicas_with(planned, max_epochs=1)
    seen = {
        "done": profiler.done,
        "clocks": plan.clocks_mhz,
        "num_changes": planned.clock_statistics.num_changes,
        "planned_j": plan.iteration_energy_j,
        "measured": [[m.time_s, m.energy_j] for m in planned.measurements],
    }
    (FOLDER / f"profile_{torch.distributed.get_rank()}.json").write_text(json.dumps(seen))


def whole(parameter):
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


@contextmanager
def quick_compiler():
    """Compile without generating code, which takes longer than all of this; `compile=True` says nothing of how."""
    compile_module = nn.Module.compile
    nn.Module.compile = partialmethod(compile_module, backend="aot_eager")
    try:
        yield
    finally:
        nn.Module.compile = compile_module


def one_device(names):
    for name in names:
        (FOLDER / f"{name}_single.json").write_text(json.dumps(fit(name, "single")))


def two_stages(names):
    for name in names:
        with quick_compiler():
            result = fit(name, "pipeline")
        (FOLDER / f"{name}_{torch.distributed.get_rank()}.json").write_text(json.dumps(result))
    profile_and_plan_replicas()


for num_ranks, function in enumerate((one_device, two_stages), start=1):
    run_ranks(function, num_ranks, sys.argv[2:] or list(RUNS))

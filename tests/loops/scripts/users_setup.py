"""What the loops of `users.py` have in common: models, data, and preparing them alone or as a pipeline."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from net import NetWithLoss, make_loaders
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from lightning_pfo.accelerate import prepare_pipeline

FOLDER = Path(sys.argv[1])
IDS = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(1))
SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def is_pipeline():
    return dist.is_initialized()


def make_accelerator(**options):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    set_seed(3)
    return Accelerator(cpu=True, **options)


def prepare(accelerator, model, optimizer=None, loader=None, **options):
    """Prepare what there is; options are those of a pipeline."""
    if is_pipeline():
        return prepare_pipeline(accelerator, model, optimizer, loader, num_microbatches=4, **options)
    given = [item for item in (model, optimizer, loader) if item is not None]
    prepared = accelerator.prepare(*given)
    prepared = list(prepared) if len(given) > 1 else [prepared]
    return [prepared.pop(0) if item is not None else None for item in (model, optimizer, loader)]


def make_llama():
    set_seed(5)
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True))


def make_bert():
    set_seed(5)
    return BertForMaskedLM(BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def make_net():
    set_seed(5)
    return NetWithLoss()


class SumOverItems(NetWithLoss):
    """Its loss is a sum divided by the number of items of several batches."""

    def forward(self, *, x, labels, num_items_in_batch=None):
        if num_items_in_batch is None:
            return super().forward(x=x, labels=labels)
        logits = super(NetWithLoss, self).forward(x)
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch}


class SumOverOthers(SumOverItems):
    """Gives the number another name."""

    def forward(self, *, x, labels, number):
        return super().forward(x=x, labels=labels, num_items_in_batch=number)


class MeanInAnyCase(NetWithLoss):
    """Takes the number, and does not divide by it, as some models of transformers."""

    def forward(self, *, x, labels, num_items_in_batch):
        return super().forward(x=x, labels=labels)


def train_loader():
    return [{"x": x, "labels": y} for x, y in make_loaders()[0]]


def named(batches):
    """As a DataLoader of named arguments."""
    return torch.utils.data.DataLoader(
        [dict(zip(("x", "labels"), sample, strict=True)) for sample in batches.dataset],
        batch_size=batches.batch_size,
    )


def sums(state):
    return {name: value.double().sum().item() for name, value in state.items()}


def write(name, results):
    (FOLDER / f"{name}.json").write_text(json.dumps(results))


def train_two(model, optimizer, accelerator):
    losses = []
    for _ in range(2):
        loss = model(input_ids=IDS, labels=IDS).loss
        accelerator.backward(loss)
        losses.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

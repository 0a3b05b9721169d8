"""Two replicas of a pipeline of two against DDP of two, the same Accelerate loop; usage: replicas.py FOLDER."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from net import Net, make_loaders
from torch import nn

from lightning_pfo.accelerate import prepare_pipeline
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
loss_fn = nn.functional.cross_entropy


def main(name):
    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    net.layers[1][0].weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train, val = make_loaders(batch_size=8)
    val = accelerator.prepare(val)  # before the pipeline
    if name == "pipeline":
        model, optimizer, train = prepare_pipeline(
            accelerator,
            net,
            optimizer,
            train,
            loss_fn,
            num_microbatches=4,
            pipeline_module="layers",
            data_parallel_size=2,
        )
    else:
        model, optimizer, train = accelerator.prepare(net, optimizer, train)
    history = {"loss": [], "norm": [], "predicted": [], "repeated": []}
    for x, y in train:
        with accelerator.accumulate(model):
            loss = model(x, y) if name == "pipeline" else loss_fn(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                history["norm"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
        history["loss"].append(loss.item())
    model.eval()
    for x, _ in val:
        with torch.no_grad():
            logits = model.predict(x) if name == "pipeline" else model(x)
        history["predicted"] += accelerator.gather_for_metrics(logits).flatten().tolist()
        history["repeated"] += accelerator.gather_for_metrics(logits.mean().repeat(8)).tolist()
    model.train()
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for x, y in train:
            loss = model(x, y) if name == "pipeline" else loss_fn(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            history["loss"].append(loss.item())
    weights = accelerator.get_state_dict(model)
    history["weights"] = {key: value.flatten().tolist() for key, value in weights.items()}
    (FOLDER / f"{name}_{dist.get_rank()}.json").write_text(json.dumps(history))


run_ranks(main, 2, "ddp")
run_ranks(main, 4, "pipeline")

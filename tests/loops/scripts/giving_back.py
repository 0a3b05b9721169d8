"""What a pipeline changes in objects that are not ours, and what `release` leaves of it: one process."""

import json
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard
from net import Net, make_loaders
from torch import nn, optim
from torch.amp import GradScaler

from lightning_pfo.accelerate import prepare_pipeline
from tests.attributes import changed, own_functions

accelerator = Accelerator(cpu=True)
accelerator.scaler = GradScaler("cpu")
net = Net()
optimizer = optim.SGD(net.parameters(), 0.1)
earlier = accelerator.prepare(optim.lr_scheduler.StepLR(optimizer, 1))
earlier.split_batches = False


def look():
    objects = own_functions(
        accelerator=accelerator, net=net, layers=net.layers, layer=net.layers[0], scaler=accelerator.scaler
    )
    objects["accelerator"] |= {"hooks": hooks() or None, "scheduler": earlier.split_batches or "step" in vars(earlier)}
    objects["accelerator"] |= {"type": type(accelerator)}
    return objects


def of_optimizer():
    return sorted({"state_dict", "load_state_dict"} & vars(prepared).keys())


def hooks():
    return len(accelerator._save_model_state_pre_hook) + len(accelerator._load_model_state_pre_hook)


def sampler():
    return [loader_before.batch_sampler.num_processes, shard.process_index, shard.even_batches]


loader_before = accelerator.prepare(make_loaders()[0])
shard = BatchSamplerShard(loader_before.batch_sampler, num_processes=2, process_index=1)  # as on one of two
loader_before.base_dataloader.__dict__["batch_sampler"] = shard
before = look()
model, prepared, loader = prepare_pipeline(
    accelerator, net, optimizer, make_loaders()[0], nn.functional.cross_entropy, pipeline_module="layers"
)
x, y = next(iter(loader))
loss = model.step(x, y)
training = changed(before, look()) + of_optimizer()
samplers = [sampler()]
model.release()
samplers.append(sampler())
after = changed(before, look()) + of_optimizer()
same = nn.functional.cross_entropy(net(x), y)  # all layers are here: the model is whole again
Path(sys.argv[1], "results.json").write_text(
    json.dumps({"training": training, "after": after, "loss": loss.item(), "same": same.item(), "sampler": samplers})
)
accelerator.end_training()

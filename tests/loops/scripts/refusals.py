"""What cannot work is refused with a reason; every rank writes FOLDER/rank_N.json."""

import copy
import io
import json
import logging
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from net import Net, make_loaders
from torch import nn

from lightning_pfo.accelerate import prepare_pipeline
from lightning_pfo.core.errors import PfoError
from lightning_pfo.loops import PipelinedModel
from tests.ranks import run_ranks

results = {}
loss_fn = nn.functional.cross_entropy


def attempt(name, case):
    try:
        case()
    except PfoError as error:
        results[name] = [type(error).__name__, str(error)]


def other_batches():
    accelerator = Accelerator(cpu=True)
    model, _, _ = prepare_pipeline(accelerator, Net(), loss_fn=loss_fn, pipeline_module="layers", num_microbatches=2)
    model(torch.full((4, 6), float(dist.get_rank())), torch.zeros(4, dtype=torch.long))


def other_batches_later():
    accelerator = Accelerator(cpu=True)
    model, _, _ = prepare_pipeline(accelerator, Net(), loss_fn=loss_fn, pipeline_module="layers", num_microbatches=2)
    for number in range(5):
        x = torch.ones(4, 6) * dist.get_rank() if number == 4 else torch.ones(4, 6)
        model(x, torch.zeros(4, dtype=torch.long))


def other_norm():
    accelerator = Accelerator(cpu=True)
    model, _, _ = prepare_pipeline(accelerator, Net(), loss_fn=loss_fn, pipeline_module="layers")
    accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=0)


def prepared_model():
    accelerator = Accelerator(cpu=True)
    prepare_pipeline(accelerator, accelerator.prepare(Net()), loss_fn=loss_fn)


class Layer(nn.Linear):
    def forward(self, x):
        return torch.tanh(super().forward(x))


def compiled_by_accelerate():
    """The first rank is told what compiles layers instead, and that does."""
    said, compiled = [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lightning_pfo").addHandler(handler)
    net = nn.Sequential(nn.Linear(6, 8), *(Layer(8, 8) for _ in range(4)), nn.Linear(8, 3))
    for layer in net[1:5]:
        layer.forward = torch.compile(layer.forward, backend=lambda graph, _: compiled.append(graph) or graph)
    model, _, _ = prepare_pipeline(Accelerator(cpu=True, dynamo_backend="eager"), net, loss_fn=loss_fn)
    logging.getLogger("lightning_pfo").removeHandler(handler)
    model.step(torch.ones(8, 6), torch.zeros(8, dtype=torch.long))
    results["compiled_by_accelerate"] = [said, len(compiled)]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(make_loaders()[0].dataset)


def prepared_stream():
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Stream(), batch_size=8))
    prepare_pipeline(accelerator, Net(), None, loader, loss_fn, pipeline_module="layers")


def no_loss():
    PipelinedModel(Net(), pipeline_module="layers", num_microbatches=4).step(torch.zeros(8, 6))


class Reversed(nn.Module):
    """Calls its layers in another order than it holds them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(size, 8) for size in (8, 8, 8, 6))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


def another_order():
    PipelinedModel(Reversed(), loss_fn, num_microbatches=4).step(*next(iter(make_loaders()[0])))


def order_of_an_example():
    batch = next(iter(make_loaders()[0]))
    PipelinedModel(Reversed(), loss_fn, num_microbatches=4, example_batch=batch).step(*batch)
    prepare_pipeline(Accelerator(cpu=True), Reversed(), None, make_loaders()[0], loss_fn)[0].step(*batch)
    profiled = PipelinedModel(Reversed(), loss_fn, num_microbatches=4, partition="profile", example_batch=batch)
    results["order_of_an_example"] = profiled.description


def loss_apart():
    model = PipelinedModel(Net(), loss_fn, pipeline_module="layers", num_microbatches=4)
    loss_fn(model(torch.zeros(8, 6)), torch.zeros(8, dtype=torch.long))


def without_accelerator():
    prepare_pipeline(Net(), None, None, loss_fn)


def scheduler_as_loss():
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    prepare_pipeline(Accelerator(cpu=True), net, optimizer, make_loaders()[0], scheduler)


def loader_as_optimizer():
    prepare_pipeline(Accelerator(cpu=True), Net(), make_loaders()[0], None, loss_fn)


def fp8_layers():
    accelerator = Accelerator(cpu=True)
    accelerator.state._mixed_precision = "fp8"  # Accelerate itself refuses it without a GPU
    prepare_pipeline(accelerator, Net(), loss_fn=loss_fn)


def without_cpu():
    AcceleratorState._reset_state(reset_partial_state=True)
    prepare_pipeline(Accelerator(), Net(), loss_fn=loss_fn)


def text_for_microbatches():
    PipelinedModel(Net(), loss_fn, num_microbatches="4")


def fraction_of_replicas():
    PipelinedModel(Net(), loss_fn, data_parallel_size=1.0)


def text_for_example():
    prepare_pipeline(Accelerator(cpu=True), Net(), loss_fn=loss_fn, example_batch="x")


def numbers_for_example():
    PipelinedModel(Net(), loss_fn, example_batch={"x": 3, "y": None})


def pickled_accelerator():
    accelerator = Accelerator(cpu=True)
    prepare_pipeline(accelerator, Net(), loss_fn=loss_fn, pipeline_module="layers")
    pickle.dumps({"accelerator": accelerator})


def copied_accelerator():
    accelerator = Accelerator(cpu=True)
    prepare_pipeline(accelerator, Net(), loss_fn=loss_fn, pipeline_module="layers")
    assert copy.deepcopy(accelerator) is accelerator  # as Accelerate says
    copy.copy(accelerator)


def model_saved_whole():
    torch.save(trained()[0], io.BytesIO())


def trained():
    model = PipelinedModel(Net(), loss_fn, pipeline_module="layers", num_microbatches=4)
    optimizer = torch.optim.AdamW(model.parameters())
    model.step(torch.ones(8, 6), torch.zeros(8, dtype=torch.long))
    optimizer.step()
    return model, optimizer


def optimizer_saved_alone():
    _, optimizer = trained()
    torch.save({"optimizer": optimizer.state_dict()}, io.BytesIO())


def optimizer_saved_together():
    model, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())  # for going back in the same process
    optimizer.step()
    optimizer.load_state_dict(state)
    file = io.BytesIO()
    whole = model.full_optimizer_state(optimizer)
    torch.save(whole, file)
    model.load_optimizer_state(optimizer, whole)  # of others it is empty
    model.load_state_dict(model.full_state_dict())
    results["optimizer_saved_together"] = len(torch.load(io.BytesIO(file.getvalue())).get("state", ()))


def optimizer_state_of_nobody():
    model, optimizer = trained()
    model.load_optimizer_state(optimizer, {})


def gradients_asked_for(of_loss, **options):
    model, _ = trained()
    loss = model(torch.ones(8, 6), torch.zeros(8, dtype=torch.long))
    torch.autograd.grad(of_loss(loss), (p for p in model.parameters() if p.requires_grad), **options)


def gradients_of_a_loss():
    gradients_asked_for(lambda loss: loss)


def gradients_of_a_multiple():
    gradients_asked_for(lambda loss: loss / 2 + 1, allow_unused=True)


def backward_for_some():
    model, _ = trained()
    model(torch.ones(8, 6), torch.zeros(8, dtype=torch.long)).backward(inputs=list(model.parameters()))


def penalty_on_gradients():
    """It looks at gradients by the input, which is fine, and differentiates them, which is not."""
    model, _ = trained()
    x, y = torch.ones(8, 6, requires_grad=True), torch.zeros(8, dtype=torch.long)
    (found,) = torch.autograd.grad(model(x, y), x)
    results["gradients_by_an_input"] = bool(found.abs().sum() > 0)
    loss = model(x, y)
    (found,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + found.square().sum()).backward()


def gradients_of_something_else():
    model = PipelinedModel(Net(), loss_fn, pipeline_module="layers", num_microbatches=4, device=torch.device("cpu", 0))
    model.step(torch.ones(8, 6), torch.zeros(8, dtype=torch.long))
    results["devices"] = sorted({str(p.device) for p in model.parameters()})
    held = next(p for p in model.parameters() if p.requires_grad and not p.is_meta)
    results["gradients_of_something_else"] = torch.autograd.grad(held.sum() * 3, held)[0].unique().tolist()
    model.release()


def wrapped_in_ddp():
    PipelinedModel(nn.parallel.DistributedDataParallel(Net()), loss_fn)


def ddp_around():
    model = PipelinedModel(Net(), loss_fn, pipeline_module="layers")
    try:
        nn.parallel.DistributedDataParallel(model)
    finally:
        model.release()
        nn.parallel.DistributedDataParallel(Net())  # others may


def pipelined_again():
    model, _ = trained()
    PipelinedModel(nn.Sequential(model), loss_fn)


def prepared_again():
    model, _ = trained()
    prepare_pipeline(Accelerator(cpu=True), model, loss_fn=loss_fn)


def text_for_a_switch():
    PipelinedModel(Net(), loss_fn, check_loss="no")


def kept_states():
    """What was gathered stays as it is while training goes on, whoever had it."""
    model, optimizer = trained()
    state, of_optimizer = model.full_state_dict(), model.full_optimizer_state(optimizer)
    before = [float(value.sum()) for value in state.values()]
    before_of_optimizer = str(of_optimizer.get("state"))
    model.step(torch.ones(8, 6), torch.zeros(8, dtype=torch.long))
    optimizer.step()
    results["kept_states"] = [
        before == [float(value.sum()) for value in state.values()],
        before_of_optimizer == str(of_optimizer.get("state")),
        before == [float(value.sum()) for value in model.full_state_dict().values()],
    ]


CASES = (
    other_batches,
    wrapped_in_ddp,
    ddp_around,
    pipelined_again,
    prepared_again,
    text_for_a_switch,
    kept_states,
    other_batches_later,
    other_norm,
    prepared_model,
    prepared_stream,
    no_loss,
    another_order,
    order_of_an_example,
)
CASES += (optimizer_state_of_nobody, optimizer_saved_alone, optimizer_saved_together)
CASES += (gradients_of_a_loss, gradients_of_a_multiple)
CASES += (compiled_by_accelerate, text_for_microbatches, fraction_of_replicas, model_saved_whole)
CASES += (text_for_example, numbers_for_example, pickled_accelerator, copied_accelerator)
CASES += (backward_for_some, penalty_on_gradients, gradients_of_something_else)
CASES += (fp8_layers, loss_apart, without_accelerator, scheduler_as_loss, loader_as_optimizer)


def main():
    for case in CASES:
        AcceleratorState._reset_state()
        GradientState._reset_state()
        attempt(case.__name__, case)
    if not torch.cuda.is_available():
        attempt("without_cpu", without_cpu)
    Path(sys.argv[1], f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))


run_ranks(main, 2)

"""Loops of Accelerate's users that are to give the same, alone and on a pipeline; see `users.py`."""

import copy
import weakref
from contextlib import nullcontext

import torch
from accelerate.local_sgd import LocalSGD
from accelerate.utils import broadcast_object_list, find_executable_batch_size, set_seed
from net import NetWithLoss, make_loaders
from safetensors.torch import load_file
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import LlamaForCausalLM
from users_setup import (
    FOLDER,
    IDS,
    SumOverItems,
    is_pipeline,
    make_accelerator,
    make_bert,
    make_llama,
    make_net,
    named,
    prepare,
    sums,
    train_loader,
    train_two,
)

from tests.saying import saying


def loaders_prepared_before():
    """A loader prepared before the model gives every rank its batches, the last one short."""
    accelerator, model = make_accelerator(), make_net()
    train, val = make_loaders()
    val, shuffled = accelerator.prepare(val, train)
    model, _, _ = prepare(accelerator, model)
    model.eval()
    found, correct = [], []
    for x, y in val:
        with torch.no_grad():
            logits = outputs_of(model, x=x, labels=y)["logits"]
        found.append([len(x), float(logits.sum())])
        correct.append(accelerator.gather_for_metrics(logits.argmax(1) == y))
    epochs = [[float(x.sum()) for x, _ in shuffled] for _ in range(2)]
    accuracy = torch.cat(correct).float().mean()
    return {"batches": found, "accuracy": float(accuracy), "sum": sum(epochs[0]), "epochs": epochs[0] != epochs[1]}


def outputs_of(model, **batch):
    return model.predict(**batch) if is_pipeline() else model(**batch)


def gathered_for_metrics():
    """Accelerate cuts what is repeated for each sample to the samples of a last short batch."""
    accelerator, model = make_accelerator(), make_net()
    model, _, val = prepare(accelerator, model, None, accelerator.prepare(named(make_loaders()[1])))
    in_loader = accelerator.gradient_state.in_dataloader
    model.eval()
    losses, texts = [], []
    for batch in val:
        with torch.no_grad():
            loss = model(**batch)["loss"]
        losses.append(accelerator.gather_for_metrics(loss.repeat(16)))
        texts += accelerator.gather_for_metrics([f"{float(value):.3f}" for value in batch["x"].sum(1)])
    losses = torch.cat(losses)
    return {"number": len(losses), "mean": float(losses.mean()), "texts": texts, "in_loader": in_loader}


def evaluated_in_inference_mode():
    accelerator, model = make_accelerator(), make_net()
    model, _, val = prepare(accelerator, model, None, named(make_loaders()[1]))
    found = []
    for is_training in (False, True, False):
        model.train(is_training)
        for batch in val:
            with nullcontext() if is_training else torch.inference_mode():
                loss = model(**batch)["loss"]
                found += [float(loss), *([] if is_training else [float(outputs_of(model, **batch)["logits"].sum())])]
            if is_training:
                accelerator.backward(loss)
    return found


def gathered_and_cut_by_hand():
    """Accelerate's example `multi_process_metrics`, and what processes tell each other besides."""
    accelerator, model = make_accelerator(), make_net()
    model, _, val = prepare(accelerator, model, None, named(make_loaders()[1]))
    model.eval()
    correct, samples_seen = 0, 0
    for step, batch in enumerate(val):
        logits = outputs_of(model, **batch)["logits"]
        predictions, labels = accelerator.gather((logits.argmax(1), batch["labels"]))
        if accelerator.use_distributed:
            if step == len(val) - 1:
                predictions = predictions[: len(val.dataset) - samples_seen]
                labels = labels[: len(val.dataset) - samples_seen]
            else:
                samples_seen += labels.shape[0]
        correct += int((predictions == labels).sum())
        last = len(labels)
    with accelerator.split_between_processes(["a", "b", "c"]) as texts:
        correct += len(texts)
    of_batch = {"mean": logits.mean(), "labels": [batch["labels"]]}
    told = [accelerator.gather(of_batch), *(accelerator.reduce(of_batch, kind) for kind in ("sum", "mean", "max"))]
    told = tree_map_only(torch.Tensor, torch.Tensor.tolist, told)
    return {"correct": correct, "last": last, "told": told, "processes": accelerator.num_processes}


def stopped_early():
    """Any process may set the trigger."""
    accelerator, model = make_accelerator(), make_net()
    model, _, loader = prepare(accelerator, model, None, named(make_loaders()[0]))
    seen = []
    for index, batch in enumerate(loader):
        accelerator.backward(model(**batch)["loss"])
        if index == 2 and accelerator.state.is_last_process:
            accelerator.set_trigger()
        if index == 3 and accelerator.is_main_process:
            accelerator.set_trigger()
        seen.append(accelerator.check_trigger())
    return seen


def loss_over_items_of_several_batches():
    """Accelerate's guide to accumulation with batches of different numbers of items."""
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    model = SumOverItems()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = {"x": torch.zeros(8, 6), "labels": torch.zeros(8, dtype=torch.long), "num_items_in_batch": 8}
    model, optimizer, _ = prepare(accelerator, model, optimizer, example_batch=example)
    batches = train_loader()
    seen = []
    for first in range(0, 6, 2):
        two = [{key: value[: 16 - 5 * index] for key, value in batches[first + index].items()} for index in range(2)]
        items = accelerator.gather(torch.tensor(sum(len(batch["x"]) for batch in two))).sum().item()
        for index, batch in enumerate(two):
            with accelerator.no_sync(model) if index == 0 else accelerator.accumulate(model):
                loss = model(**batch, num_items_in_batch=items)["loss"]
                accelerator.backward(loss * 2 * accelerator.num_processes)
                seen.append(loss.item() * accelerator.num_processes)
        seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 10.0)))
        seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 10.0, norm_type=1)))
        seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=3.0)))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():  # transformers' models take the mean where nobody names the number
        seen += [model(**batches[0], **items)["loss"].item() for items in ({}, {"num_items_in_batch": 5})]
    return seen


def outputs_and_attributes():
    """`outputs.logits`, `outputs[0]`, `"logits" in outputs`, `model.config`; in training the loss."""
    accelerator, model = make_accelerator(), make_bert()
    example = {"input_ids": IDS, "labels": IDS}
    model, _, _ = prepare(accelerator, model, example_batch=example)
    model.eval()
    with torch.no_grad():
        outputs = model(input_ids=IDS, labels=IDS)
        without_loss = model(input_ids=IDS)
    seen = [outputs.loss.item(), outputs[0].item(), float(outputs.logits.sum()), float(outputs["logits"].std())]
    seen += [float(outputs[1].sum()), float(without_loss.logits.sum()), model.config.vocab_size, model.num_parameters()]
    seen += [
        len(outputs),
        "logits" in outputs,
        "states" in outputs,
        outputs.get("states", 3),
        list(outputs),
        list({**outputs}),
    ]
    seen += [[float(each.sum()) for each in outputs.to_tuple()]]
    seen += [[tuple(each.shape) for each in outputs[:2]], [(name, each.dim()) for name, each in outputs.items()]]
    model.train()
    outputs = model(input_ids=IDS, labels=IDS)
    return [*seen, outputs["loss"].item(), outputs[0].item(), hasattr(outputs, "loss")]


class Scaled(NetWithLoss):
    """Reads a number that loops set on the prepared model."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.shift = 0.0

    def forward(self, *, x, labels):
        outputs = super().forward(x=x, labels=labels)
        return outputs | {"loss": self.factor * outputs["loss"] + self.shift}


def another_type_afterwards():
    """Token ids do not tell that values between stages have another type."""
    accelerator, model = make_accelerator(), make_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, seen = {"input_ids": IDS, "labels": IDS}, []
    model, optimizer, _ = prepare(accelerator, model, optimizer, example_batch=batch)
    for dtype in (torch.float32, torch.float64):
        model = model.to(dtype)
        for _ in range(2):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
    return seen


def attributes_that_loops_set():
    set_seed(5)
    accelerator, model = make_accelerator(), Scaled()
    model, _, loader = prepare(accelerator, model, None, named(make_loaders()[1]))
    batch, seen = next(iter(loader)), []
    for factor in (1.0, 3.0):
        model.factor, model.shift = factor, 2 * factor
        seen += [model(**batch)["loss"].item(), model.factor, accelerator.unwrap_model(model).shift]
    return seen


def prepared_later():
    """An optimizer, prepared a second time, only later, or before, has one place and whole states in checkpoints."""
    seen = []
    for when in ("again", "later", "before"):
        accelerator, model = make_accelerator(), make_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if when == "before":
            optimizer = accelerator.prepare(optimizer)
        model, prepared, _ = prepare(accelerator, model, None if when == "later" else optimizer)
        optimizer = prepared if when == "before" else accelerator.prepare(prepared or optimizer)
        for batch in train_loader()[:2]:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()
        num_states = len(state["state"]) if accelerator.is_main_process else 11 + len(state)  # others have none
        seen.append([len(accelerator._optimizers), num_states])
        whole = accelerator.get_state_dict(model)
        seen.append(sums(whole) if accelerator.is_main_process else {})
    return seen


def local_sgd():
    """With one replica there is nothing to average."""
    accelerator, model = make_accelerator(), make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _ = prepare(accelerator, model, optimizer)
    losses = []
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for batch in train_loader()[:4]:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            losses.append(loss.item())
    return losses


def saved_for_others():
    """`save_pretrained` without a state dict, and with the one that Accelerate's guides give it; `save_model`."""
    accelerator, model = make_accelerator(), make_llama()
    example = {"input_ids": IDS, "labels": IDS}
    model, _, _ = prepare(accelerator, model, example_batch=example)
    name = "pipeline" if is_pipeline() else "alone"
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(FOLDER / f"{name}_saved", is_main_process=accelerator.is_main_process)
    state = accelerator.get_state_dict(model)
    unwrapped.save_pretrained(FOLDER / f"{name}_saved_again", state_dict=state)
    accelerator.save_model(model, FOLDER / f"{name}_model")
    accelerator.wait_for_everyone()
    folders = [FOLDER / f"{name}_saved", FOLDER / f"{name}_saved_again"]
    with torch.no_grad():
        losses = [LlamaForCausalLM.from_pretrained(folder)(IDS, labels=IDS).loss.item() for folder in folders]
    return [*losses, sums(load_file(FOLDER / f"{name}_model" / "model.safetensors"))]


def gathered_module():
    """The whole model generates, is tied and frozen as it was, and is no part of the training that goes on."""
    accelerator, model = make_accelerator(), make_llama()
    model.model.layers[1].mlp.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    example = {"input_ids": IDS, "labels": IDS}
    model, optimizer, _ = prepare(accelerator, model, optimizer, example_batch=example)
    losses, generated = train_two(model, optimizer, accelerator), []
    whole = model.gather_module() if is_pipeline() else model
    if accelerator.is_main_process:
        generated = whole.generate(IDS[:2, :2], max_new_tokens=5, do_sample=False, pad_token_id=0).tolist()
        whole.train()
        tied = whole.lm_head.weight is whole.model.embed_tokens.weight
        trained = [name for name, parameter in whole.named_parameters() if parameter.requires_grad]
        copied = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        generated += [tied, trained, sums(copied), sums(whole.state_dict())]
        if is_pipeline():
            whole.lm_head.weight.data.zero_()
    return {"losses": losses + train_two(model, optimizer, accelerator), "whole": generated, "none": whole is None}


class LooksAgain(NetWithLoss):
    """Uses its input on the first stage and on the last."""

    def forward(self, *, x, labels):
        logits = super(NetWithLoss, self).forward(x) + x[:, :3]
        return {"loss": nn.functional.cross_entropy(logits, labels)}


def inputs_with_a_graph():
    """A generator that learns through a discriminator, and a prompt through a frozen model."""
    accelerator, judge = make_accelerator(), LooksAgain()
    maker, prompt = nn.Linear(4, 6), nn.Parameter(torch.zeros(6))
    noise, labels = torch.randn(8, 4), torch.arange(8) % 3
    optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
    example = {"x": torch.zeros(8, 6), "labels": labels}
    judge, optimizer, _ = prepare(accelerator, judge, optimizer, example_batch=example)
    of_maker = accelerator.prepare(torch.optim.SGD([*maker.parameters(), prompt], lr=0.5))
    seen = []
    for _ in range(2):
        images = maker(noise)
        accelerator.backward(judge(x=images.detach(), labels=labels)["loss"])
        optimizer.step()
        loss = judge(x=images + prompt, labels=labels)["loss"]
        accelerator.backward(loss * 2)
        seen += [loss.item(), float(maker.weight.grad.norm()), float(prompt.grad.norm())]
        of_maker.step()
        optimizer.zero_grad()
        of_maker.zero_grad()
    judge.requires_grad_(False)
    judge.eval()
    loss = judge(x=maker(noise) + prompt, labels=labels)["loss"]
    accelerator.backward(loss)
    return [*seen, loss.item(), prompt.grad.tolist(), float(maker.bias.grad.norm())]


class OutOfMemory(nn.Module):
    """Has memory for microbatches of so many samples."""

    def forward(self, x):
        if x.device.type != "meta" and len(x) > OutOfMemory.largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x


def batch_sizes_that_fit():
    """`find_executable_batch_size`; what did not fit is gone before the next try."""
    accelerator, tried, models = make_accelerator(), [], []
    OutOfMemory.largest = 2 if is_pipeline() else 8  # of the last layer, so of the last stage alone

    sizes = iter([12, 8])

    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size):
        accelerator.free_memory()
        tried.append([batch_size, sum(model() is not None for model in models)])
        net = make_net()
        net.layers.append(OutOfMemory())
        models.append(weakref.ref(net))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options = {"pipeline_module": "layers", "check_loss": False}
        model, optimizer, loader = prepare(
            accelerator, net, optimizer, named(make_loaders(batch_size=batch_size)[0]), **options
        )
        for batch in loader:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            return batch_size, loss.item()

    found = train()
    accelerator.free_memory()
    left = sorted({"prepare_data_loader", "gather_for_metrics", "unwrap_model"} & vars(accelerator).keys())
    return [*found, tried, [model() is not None for model in models], left]


def batch_sizes_that_fit_one_rank():
    """One rank alone has no memory, where nobody else takes part: between its backward and the next batch."""
    accelerator, tried = make_accelerator(), []

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            if tried[-1] > 8 and (accelerator.process_index or not is_pipeline()):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().step(closure)

    sizes = iter([12, 8])

    @find_executable_batch_size(starting_batch_size=16, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size):
        accelerator.free_memory()
        tried.append(batch_size)
        net = make_net()
        model, optimizer, loader = prepare(
            accelerator, net, Optimizer(net.parameters(), lr=0.1), named(make_loaders(batch_size=batch_size)[0])
        )
        losses = []
        for batch in loader:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    found = train()
    accelerator.free_memory()
    return found, tried


def whole_parameters():
    """Code between steps reads and writes parameters of all stages, or of a part; what it writes is trained on."""
    accelerator, model = make_accelerator(), make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = prepare(accelerator, model, optimizer, named(make_loaders()[1]))
    net = accelerator.unwrap_model(model)
    whole = model.whole_parameters if is_pipeline() else lambda *_: nullcontext()
    losses, norms = [], []
    for batch in loader:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        with whole(), torch.no_grad():
            norm = torch.stack([p.norm() for p in net.parameters()]).norm()
            for p in net.parameters():
                p.mul_(4 / norm)
        with whole(net.stem, net.head), torch.no_grad():
            net.head.bias.copy_(net.stem.weight[:3, 0])
            norms.append([float(norm), *net.head.bias.tolist()])
    absent = [name for name, p in net.named_parameters() if p.is_meta]
    return {"losses": losses, "norms": norms, "absent": absent != [], "weights": sums(state_of(accelerator, model))}


def state_of(accelerator, model):
    """That of all stages, on every rank."""
    state = accelerator.get_state_dict(model)
    return {name: value.cpu() for name, value in broadcast_object_list([state])[0].items()}


def train_both(load=None, save=None):
    """Two models of one accelerator, of which the second has two steps for each batch."""
    accelerator, models, optimizers = make_accelerator(), [], []
    for make in (make_net, NetWithLoss):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, _ = prepare(accelerator, model, optimizer, example_batch=train_loader()[0])
        models.append(model)
        optimizers.append(optimizer)
    if load:
        accelerator.load_state(load)
    found = [model.iteration for model in models] if is_pipeline() else [2, 4] if load else [0, 0]
    for batch in train_loader()[:2]:
        for number in (0, 1, 1):
            loss = models[number](**batch)["loss"]
            accelerator.backward(loss)
            found.append(float(accelerator.clip_grad_norm_(models[number].parameters(), 0.5)))
            optimizers[number].step()
            optimizers[number].zero_grad()
            found.append(loss.item())
    if save:
        accelerator.save_state(save)
    return found


def two_of_one_accelerator():
    """They go on from a checkpoint."""
    folder = FOLDER / f"two_{'pipelines' if is_pipeline() else 'models'}"
    return {"begun": train_both(save=folder), "gone on": train_both(load=folder)}


def models_taken_by_a_hook():
    """A hook of one's own loads the models, and takes them from the list, as Accelerate says it should."""
    folder = FOLDER / f"hook_{'pipeline' if is_pipeline() else 'model'}"
    accelerator, model = make_accelerator(), make_net()
    taken = []

    def load(models, _):
        while models:
            taken.append(models.pop())

    accelerator.register_load_state_pre_hook(load)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, _ = prepare(accelerator, model, optimizer, example_batch=train_loader()[0])
    found = []
    for number, batch in enumerate(train_loader()[:3]):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if number == 1:
            accelerator.save_state(folder)
    accelerator.load_state(folder)  # but for the weights
    return [*found, model.iteration if is_pipeline() else 2, [each is model for each in taken]]


def averages_and_a_teacher():
    """An average of weights, one of states, and a prepared teacher that follows; within `whole_parameters`."""
    accelerator, model, teacher = make_accelerator(), make_net(), make_net()
    average, of_states = copy.deepcopy(model), {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(accelerator, model, optimizer, named(make_loaders()[1]))
    options = {"example_batch": next(iter(loader)), "partition": "custom:0,1,5"} if is_pipeline() else {}
    teacher, _, _ = prepare(accelerator, teacher, **options)
    student, follower = accelerator.unwrap_model(model), accelerator.unwrap_model(teacher)
    whole = [model.whole_parameters, teacher.whole_parameters] if is_pipeline() else [nullcontext] * 2
    losses = []
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), whole[0](), whole[1]():
            for mine, following, p in zip(
                average.parameters(), follower.parameters(), student.parameters(), strict=True
            ):
                mine.lerp_(p, 0.1)
                following.lerp_(p, 0.3)
            of_states = {name: 0.9 * of_states.get(name, value) + value for name, value in model.state_dict().items()}
        losses.append(teacher(**batch)["loss"].item())
    return {"losses": losses, "average": sums(average.state_dict()), "states": sums(of_states)}


def rolled_back():
    """Model and optimizer go back to what was kept in memory; what the first rank alone has is enough."""
    accelerator, model = make_accelerator(), make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = prepare(accelerator, model, optimizer, named(make_loaders()[0]))
    losses, kept = [], None
    for step, batch in enumerate([*loader] * 2):
        if step == 2:
            kept = copy.deepcopy([accelerator.get_state_dict(model), optimizer.state_dict()])
        if step in (4, 6):
            losses.append(str(model.load_state_dict(kept[0])))
            optimizer.load_state_dict(copy.deepcopy(kept[1]))  # torch's would go on with the tensors themselves
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": sums(state_of(accelerator, model))}


def state_from_the_beginning():
    """Adagrad has a state of all parameters before its first step, of placeholders too."""
    accelerator, model = make_accelerator(), make_net()
    model, _, loader = prepare(accelerator, model, None, named(make_loaders()[0]))
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    optimizer = accelerator.prepare(adagrad)
    losses, kept = [], copy.deepcopy(optimizer.state_dict())
    for step, batch in enumerate(loader):
        if step in (2, 5):
            optimizer.load_state_dict(copy.deepcopy(kept))
            kept = copy.deepcopy(optimizer.state_dict())
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    states = [{name: float(value.sum()) for name, value in each.items()} for each in kept.get("state", {}).values()]
    told = broadcast_object_list([states])
    return {"losses": losses, "states": told[0]}


def norm_by_hand(parameters):
    return float(torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm())


def norm_of_torch(parameters):
    return float(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def clips_by_a_norm_of_torch(parameters):
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    nn.utils.clip_grads_with_norm_(parameters, 1e9, norm)
    return float(norm)


def clips_values(parameters):
    """Which needs no norm."""
    nn.utils.clip_grad_value_(parameters, 1e9)


def norms_of_gradients():
    """Each function twice; and what is said of it."""
    accelerator, model = make_accelerator(), make_net()
    model, _, _ = prepare(accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(**train_loader()[0])["loss"])
    parameters, found = list(model.parameters()), {}
    for look in (norm_by_hand, norm_of_torch, clips_by_a_norm_of_torch, clips_values):
        with saying() as said:
            norms = [look(parameters) for _ in range(2)]
        of_one_rank = [text for text in said if "reads gradients of layers of other ranks" in text]
        found[look.__name__] = {"norms": norms, "said": of_one_rank}
    infinite = float("inf")
    whole = model.clip_grad_norm_(infinite) if is_pipeline() else accelerator.clip_grad_norm_(parameters, infinite)
    return found | {"whole": float(whole)}


def accumulated_without_sync():
    """By the model's own context, which one process does not have."""
    accelerator, model = make_accelerator(), make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _ = prepare(accelerator, model, optimizer)
    found = []
    for index, batch in enumerate(train_loader()[:6]):
        with model.no_sync() if is_pipeline() and index % 2 == 0 else nullcontext():
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
        found.append(loss.item())
        if index % 2:
            found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
    return found


LOOPS = (
    norms_of_gradients,
    accumulated_without_sync,
    two_of_one_accelerator,
    models_taken_by_a_hook,
    rolled_back,
    state_from_the_beginning,
    averages_and_a_teacher,
    whole_parameters,
    loaders_prepared_before,
    gathered_for_metrics,
    evaluated_in_inference_mode,
    gathered_and_cut_by_hand,
    stopped_early,
    loss_over_items_of_several_batches,
    outputs_and_attributes,
    attributes_that_loops_set,
    another_type_afterwards,
    prepared_later,
    local_sgd,
    saved_for_others,
    gathered_module,
    inputs_with_a_graph,
    batch_sizes_that_fit,
    batch_sizes_that_fit_one_rank,
)

"""Loops of Accelerate's users, alone and on a pipeline of two; usage: users.py FOLDER.

Each loop of `LOOPS` is run by one process with Accelerate's own `prepare`, and by two ranks with `prepare_pipeline`;
what it returns is compared. Each of `REFUSALS` is run by two ranks only.
"""

import gc
import json
import os
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import find_executable_batch_size, set_seed
from net import NetWithLoss, make_loaders
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from lightning_pfo.accelerate import prepare_pipeline
from lightning_pfo.core.errors import PfoError
from tests.ranks import run_ranks

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


# ---- checkpoints of tied weights ----


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


def go_on(make, load, save):
    accelerator, model = make_accelerator(), make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    example = {"input_ids": IDS, "labels": IDS}
    model, optimizer, _ = prepare(
        accelerator, model, optimizer, **({"example_batch": example} if is_pipeline() else {})
    )
    if load is not None:
        accelerator.load_state(FOLDER / load)
    losses = train_two(model, optimizer, accelerator)
    if save is not None:
        accelerator.save_state(FOLDER / save)
    return losses


FAMILIES = {"llama": make_llama, "bert": make_bert}


def begin_alone():
    results = {}
    for name, make in FAMILIES.items():
        results[name] = [go_on(make, None, f"{name}_begun"), go_on(make, f"{name}_begun", f"{name}_alone")]
        results[name].append(go_on(make, f"{name}_alone", None))
    write("tied_alone", results)


def go_on_in_a_pipeline():
    results = {name: go_on(make, f"{name}_begun", f"{name}_pipeline") for name, make in FAMILIES.items()}
    write(f"tied_pipeline_{dist.get_rank()}", results)


def end_alone():
    write("tied_again", {name: go_on(make, f"{name}_pipeline", None) for name, make in FAMILIES.items()})


def write(name, results):
    (FOLDER / f"{name}.json").write_text(json.dumps(results))


# ---- loops that are to give the same ----


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


class SumOverItems(NetWithLoss):
    """Its loss is a sum divided by the number of items of several batches."""

    def forward(self, *, x, labels, num_items_in_batch):
        logits = super(NetWithLoss, self).forward(x)
        return {"loss": nn.functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch}


def loss_over_items_of_several_batches():
    """Accelerate's guide to accumulation with batches of different numbers of items."""
    accelerator = make_accelerator(gradient_accumulation_steps=2)
    model = SumOverItems()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = {"x": torch.zeros(8, 6), "labels": torch.zeros(8, dtype=torch.long), "num_items_in_batch": 8}
    options = {"example_batch": example, "microbatch_weight": "sum"} if is_pipeline() else {}
    model, optimizer, _ = prepare(accelerator, model, optimizer, **options)
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
        optimizer.step()
        optimizer.zero_grad()
    return seen


def outputs_and_attributes():
    """`outputs.logits`, `outputs[0]`, `model.config`; in training the loss."""
    accelerator, model = make_accelerator(), make_bert()
    example = {"example_batch": {"input_ids": IDS, "labels": IDS}} if is_pipeline() else {}
    model, _, _ = prepare(accelerator, model, **example)
    model.eval()
    with torch.no_grad():
        outputs = model(input_ids=IDS, labels=IDS)
        without_loss = model(input_ids=IDS)
    seen = [outputs.loss.item(), outputs[0].item(), float(outputs.logits.sum()), float(outputs["logits"].std())]
    seen += [float(outputs[1].sum()), float(without_loss.logits.sum()), model.config.vocab_size, model.num_parameters()]
    model.train()
    outputs = model(input_ids=IDS, labels=IDS)
    return [*seen, outputs["loss"].item(), outputs[0].item(), hasattr(outputs, "loss")]


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
        seen.append([len(accelerator._optimizers), len(state["state"]) if accelerator.is_main_process else 11])
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
    example = {"example_batch": {"input_ids": IDS, "labels": IDS}} if is_pipeline() else {}
    model, _, _ = prepare(accelerator, model, **example)
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
    example = {"example_batch": {"input_ids": IDS, "labels": IDS}} if is_pipeline() else {}
    model, optimizer, _ = prepare(accelerator, model, optimizer, **example)
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
    example = {"example_batch": {"x": torch.zeros(8, 6), "labels": labels}} if is_pipeline() else {}
    judge, optimizer, _ = prepare(accelerator, judge, optimizer, **example)
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
        options = {"pipeline_module": "layers", "check_loss": False} if is_pipeline() else {}
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


LOOPS = (
    loaders_prepared_before,
    gathered_for_metrics,
    loss_over_items_of_several_batches,
    outputs_and_attributes,
    prepared_later,
    local_sgd,
    saved_for_others,
    gathered_module,
    inputs_with_a_graph,
    batch_sizes_that_fit,
)


# ---- what a pipeline cannot do: it says why ----


def simple(**options):
    accelerator, model = make_accelerator(), make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(accelerator, model, optimizer, named(make_loaders()[1]), **options)
    return accelerator, model, next(iter(loader))


def outputs_in_training():
    _, model, batch = simple()
    return model(**batch).logits


def term_over_parameters():
    accelerator, model, batch = simple()
    accelerator.backward(model(**batch).loss + 0.1 * sum(p.square().sum() for p in model.parameters()))


def items_without_weights():
    model, _, _ = prepare(make_accelerator(), SumOverItems(), pipeline_module="layers")
    batch = train_loader()[0]
    model(**batch, num_items_in_batch=16)


def norm_of_a_rank():
    accelerator, model, batch = simple()
    accelerator.backward(model(**batch).loss)
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    finally:
        accelerator.free_memory()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # which is torch's own again


def saved_placeholders():
    accelerator, model, _ = simple()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), FOLDER / "placeholders.bin")
    torch.save({"model": model.state_dict()}, FOLDER / f"placeholders_{dist.get_rank()}.bin")


def state_on_the_main_process():
    accelerator, model, _ = simple()
    if accelerator.is_main_process:
        accelerator.get_state_dict(model)
    accelerator.wait_for_everyone()


def evaluation_on_the_main_process():
    accelerator, model, batch = simple()
    if accelerator.is_main_process:
        model.eval()
        model(**batch)
    else:
        accelerator.gather(torch.zeros(1))


def prediction_on_the_main_process():
    accelerator, model, batch = simple()
    loader = accelerator.prepare(make_loaders()[1])
    if accelerator.is_main_process:
        model.predict(**batch)
    next(iter(loader))


def outputs_on_the_main_process():
    accelerator, model, batch = simple()
    model.eval()
    outputs = model(**batch)
    if accelerator.is_main_process:
        outputs.logits.sum()
    model(**batch)


def other_batches_to_predict():
    _, model, batch = simple()
    model.predict(x=batch["x"] + dist.get_rank(), labels=batch["labels"])


def generation():
    accelerator, model = make_accelerator(), make_llama()
    model, _, _ = prepare(accelerator, model, example_batch={"input_ids": IDS, "labels": IDS})
    assert model.eval()(input_ids=IDS, labels=IDS).past_key_values is None  # it would be sent from stage to stage
    accelerator.unwrap_model(model).generate(IDS[:, :2], max_new_tokens=1)


class ReturnsTuple(NetWithLoss):
    def forward(self, *, x, labels):
        outputs = super().forward(x=x, labels=labels)
        return outputs["loss"], outputs["logits"]


def tuple_with_loss():
    model, _, _ = prepare(make_accelerator(), ReturnsTuple(), pipeline_module="layers")
    x, y = next(iter(make_loaders()[1]))
    model(x=x, labels=y)


def freed_model():
    accelerator, model, batch = simple()
    accelerator.free_memory()
    model(**batch)


REFUSALS = (
    outputs_in_training,
    term_over_parameters,
    items_without_weights,
    norm_of_a_rank,
    saved_placeholders,
    state_on_the_main_process,
    evaluation_on_the_main_process,
    prediction_on_the_main_process,
    outputs_on_the_main_process,
    other_batches_to_predict,
    generation,
    tuple_with_loss,
    freed_model,
)


def attempt(case):
    try:
        return case()
    except Exception as error:
        if not isinstance(error, PfoError):
            import traceback

            traceback.print_exc()
        return [type(error).__name__, str(error)]


def state_when_others_have_ended():
    accelerator, model, _ = simple()
    if not accelerator.is_main_process:
        os._exit(0)
    accelerator.get_state_dict(model)


def main():
    gc.freeze()  # what was imported: Accelerate collects garbage whenever it frees memory
    results = {case.__name__: attempt(case) for case in LOOPS}
    if is_pipeline():
        results |= {case.__name__: attempt(case) for case in REFUSALS}
    write(f"pipeline_{dist.get_rank()}" if is_pipeline() else "alone", results)
    if is_pipeline():
        write("ended", attempt(state_when_others_have_ended))
        os._exit(0)


if __name__ == "__main__":
    run_ranks(begin_alone, 1)
    run_ranks(go_on_in_a_pipeline, 2)
    run_ranks(end_alone, 1)
    run_ranks(main, 1)
    run_ranks(main, 2)

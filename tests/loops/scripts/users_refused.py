"""What loops of Accelerate's users do that a pipeline cannot: it says why; see `users.py`."""

import copy
import os

import torch
import torch.distributed as dist
from accelerate.utils import gather
from net import NetWithLoss, make_loaders
from users_setup import (
    FOLDER,
    IDS,
    MeanInAnyCase,
    SumOverOthers,
    make_accelerator,
    make_llama,
    make_net,
    named,
    prepare,
    train_loader,
)


def simple():
    accelerator, model = make_accelerator(), make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = prepare(accelerator, model, optimizer, named(make_loaders()[1]))
    return accelerator, model, next(iter(loader))


def outputs_in_training():
    _, model, batch = simple()
    return model(**batch).logits


def averaged_by_hand():
    _, model, _ = simple()
    with torch.no_grad():
        for average, p in zip(make_net().parameters(), model.module.parameters(), strict=True):
            average.lerp_(p, 0.1)


def averaged_state():
    _, model, _ = simple()
    return sum(float((0.9 * value).norm()) for value in model.state_dict().values())


def tuple_in_training():
    _, model, batch = simple()
    model(**batch).to_tuple()


def saved_on_the_main_process():
    accelerator, model = make_accelerator(), make_llama()
    model, _, _ = prepare(accelerator, model, example_batch={"input_ids": IDS, "labels": IDS})
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(FOLDER / "on_main")
    accelerator.get_state_dict(model)


def module_saved_on_the_main_process():
    accelerator, model, _ = simple()
    if accelerator.is_main_process:
        accelerator.save_model(model, FOLDER / "on_main")
    accelerator.wait_for_everyone()


def term_over_parameters():
    accelerator, model, batch = simple()
    accelerator.backward(model(**batch).loss + 0.1 * sum(p.square().sum() for p in model.parameters()))


def items_without_weights():
    model, _, _ = prepare(make_accelerator(), SumOverOthers(), pipeline_module="layers")
    model(**train_loader()[0], number=16)


def items_that_nobody_divides_by():
    model, _, _ = prepare(make_accelerator(), MeanInAnyCase(), pipeline_module="layers")
    model(**train_loader()[0], num_items_in_batch=16)


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


def gathered_values_of_processes():
    accelerator, _, _ = simple()
    assert gather(accelerator.process_index * torch.ones(1)).tolist() == [0.0, 1.0]  # what the message says
    accelerator.gather({"memory": accelerator.process_index * torch.ones(1)})


def summed_values_of_processes():
    accelerator, _, _ = simple()
    assert accelerator.reduce(accelerator.process_index * torch.ones(1), "max") == 1
    accelerator.reduce(accelerator.process_index * torch.ones(1))


def evaluation_while_others_wait():
    accelerator, model, batch = simple()
    model.eval()
    with accelerator.main_process_first():
        model(**batch)


def question_of_outputs_in_training():
    _, model, batch = simple()
    return "logits" in model(**batch)


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


def lbfgs():
    accelerator, model = make_accelerator(), make_net()
    optimizer = torch.optim.LBFGS(model.parameters())
    model, optimizer, loader = prepare(accelerator, model, optimizer, named(make_loaders()[1]))
    batch = next(iter(loader))
    optimizer.step(lambda: model(**batch).loss)


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


def state_when_others_have_ended():
    accelerator, model, _ = simple()
    if not accelerator.is_main_process:
        os._exit(0)
    accelerator.get_state_dict(model)


def backward_in_evaluation():
    accelerator, model, batch = simple()
    accelerator.backward(model.eval()(**batch).loss)


def another_backward():
    accelerator, model, batch = simple()
    loss = model(**batch).loss
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(3 * loss)


def copied_model():
    copy.deepcopy(simple()[1])


def compiled_afterwards():
    _, model, batch = simple()
    torch.compile(model, backend="eager")(**batch)


def part_of_a_state_for_others():
    accelerator, model = make_accelerator(), make_net()
    model, optimizer, _ = prepare(accelerator, model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(**train_loader()[0])["loss"])
    optimizer.step()
    optimizer.load_state_dict(optimizer.optimizer.state_dict() if accelerator.is_main_process else {})


def placeholders_for_others():
    accelerator, model, _ = simple()
    model.load_state_dict({} if accelerator.is_main_process else model.state_dict())


REFUSALS = (
    part_of_a_state_for_others,
    placeholders_for_others,
    backward_in_evaluation,
    another_backward,
    copied_model,
    compiled_afterwards,
    outputs_in_training,
    term_over_parameters,
    items_without_weights,
    items_that_nobody_divides_by,
    saved_placeholders,
    averaged_by_hand,
    averaged_state,
    tuple_in_training,
    saved_on_the_main_process,
    module_saved_on_the_main_process,
    state_on_the_main_process,
    evaluation_on_the_main_process,
    prediction_on_the_main_process,
    outputs_on_the_main_process,
    evaluation_while_others_wait,
    question_of_outputs_in_training,
    gathered_values_of_processes,
    summed_values_of_processes,
    other_batches_to_predict,
    lbfgs,
    generation,
    tuple_with_loss,
    freed_model,
)

"""Loops of Accelerate's users, alone and on a pipeline of one and of two; usage: users.py FOLDER.

Each loop of `LOOPS` is run by one process with Accelerate's own `prepare`, and by one rank and by two with
`prepare_pipeline`; what it returns is compared. Each of `REFUSALS` is run by two ranks only. Models with tied weights
go on from each other's checkpoints.
"""

import gc
import os

import torch
import torch.distributed as dist
from users_loops import LOOPS
from users_refused import REFUSALS, state_when_others_have_ended
from users_setup import (
    FOLDER,
    IDS,
    is_pipeline,
    make_accelerator,
    make_bert,
    make_llama,
    prepare,
    train_two,
    write,
)

from lightning_pfo.core.errors import PfoError
from tests.ranks import run_ranks


def go_on(make, load, save):
    accelerator, model = make_accelerator(), make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    example = {"input_ids": IDS, "labels": IDS}
    model, optimizer, _ = prepare(accelerator, model, optimizer, example_batch=example)
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


def attempt(case):
    try:
        return case()
    except Exception as error:
        if not isinstance(error, PfoError):
            import traceback

            traceback.print_exc()
        return [type(error).__name__, str(error)]


def main():
    gc.freeze()  # what was imported: Accelerate collects garbage whenever it frees memory
    results = {case.__name__: attempt(case) for case in LOOPS}
    if is_pipeline():
        results |= {case.__name__: attempt(case) for case in REFUSALS}
    write(f"pipeline_{dist.get_rank()}" if is_pipeline() else "alone", results)
    if is_pipeline():
        write("ended", attempt(state_when_others_have_ended))
        os._exit(0)


def main_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.freeze()
    write("of_one", {case.__name__: attempt(case) for case in LOOPS})


if __name__ == "__main__":
    run_ranks(begin_alone, 1)
    run_ranks(go_on_in_a_pipeline, 2)
    run_ranks(end_alone, 1)
    run_ranks(main, 1)
    run_ranks(main_of_one, 1)
    run_ranks(main, 2)

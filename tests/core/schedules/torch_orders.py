"""What torch makes of schedules, without processes: reads lists of tasks from stdin, writes answers to stdout.

Each list is a line of JSON, and so are its answers.

A task is ["orders", class, ranks, microbatches, stages_per_rank] -> orders (or the error as text),
["dump", class, ranks, microbatches, stages_per_rank, file] -> None, after writing torch's compute_only CSV,
or ["check", stages, microbatches, orders] -> the error with which torch refuses our orders, or None.
"""

import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore


def make(name, num_ranks, num_microbatches, stages_per_rank):
    v_shaped = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    num_stages = num_ranks * stages_per_rank
    local = (0, num_stages - 1) if v_shaped else range(0, num_stages, num_ranks)
    stages = [PipelineStage(torch.nn.Identity(), stage, num_stages, torch.device("cpu")) for stage in local]
    if name == "ScheduleGPipe":
        return schedules.ScheduleGPipe(stages[0], num_microbatches)
    return getattr(schedules, name)(stages, num_microbatches, loss_fn=torch.add)


def flatten(actions):
    for action in actions:
        if action is None:
            continue
        if action.sub_actions:  # DualPipeV's OVERLAP_F_B
            yield from flatten(action.sub_actions)
        elif action.is_compute_op:
            yield str(action)


def orders(*case):
    try:
        schedule = make(*case)
    except (ValueError, AssertionError) as error:
        return str(error)
    single = isinstance(schedule, schedules.PipelineScheduleSingle)
    order = schedule._get_pipeline_order() if single else schedule.pipeline_order
    return [list(flatten(order[rank])) for rank in range(len(order))]


def dump(*case_and_file):
    *case, file = case_and_file
    make(*case)._dump_csv(file, format="compute_only")


def check(num_stages, num_microbatches, rows):
    actions = {rank: [schedules._Action.from_str(text) for text in row] for rank, row in enumerate(rows)}
    try:
        rank_of = schedules._validate_schedule(actions, len(rows), num_stages, num_microbatches)
        with_comms = schedules._add_send_recv({r: list(a) for r, a in actions.items()}, rank_of.__getitem__, num_stages)
        schedules._simulate_comms_compute(with_comms, rank_of.__getitem__, num_stages)
    except (ValueError, AssertionError) as error:
        return str(error)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        answers = []
        for kind, *arguments in json.loads(line):
            world_size = arguments[1] if kind != "check" else 1
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
            answers.append({"orders": orders, "dump": dump, "check": check}[kind](*arguments))
            dist.destroy_process_group()
        print(json.dumps(answers), flush=True)

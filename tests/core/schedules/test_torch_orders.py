"""Our orders against the ones of torch.distributed.pipelining."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.registry import load_schedule, make_schedule

pytestmark = pytest.mark.slow

TORCH_NAMES = {
    "gpipe": "ScheduleGPipe",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
STAGES_PER_RANK = {"gpipe": (1,), "zbv": (2,), "dualpipev": (2,)}


@pytest.fixture(scope="module")
def ask_torch():
    """A function from tasks to answers; one process gives all of them."""
    script = Path(__file__).with_name("torch_orders.py")
    process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(tasks):
        process.stdin.write(json.dumps(tasks) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.kill()
    process.wait()


def as_text(schedule):
    return [[str(inst) for inst in order] for order in schedule.orders]


def test_orders_equal_those_of_torch_and_what_torch_refuses_is_refused(ask_torch):
    cases = [
        (name, num_ranks, num_microbatches, stages_per_rank)
        for name in TORCH_NAMES
        for num_ranks in (1, 2, 3, 4, 8)
        for num_microbatches in (*range(1, 10), 12, 16, 19, 24)
        for stages_per_rank in STAGES_PER_RANK.get(name, (1, 2, 3))
    ]
    answers = ask_torch([("orders", TORCH_NAMES[name], *numbers) for name, *numbers in cases])
    num_refused = dict.fromkeys(TORCH_NAMES, 0)
    for case, theirs in zip(cases, answers, strict=True):
        if isinstance(theirs, str):
            with pytest.raises(ConfigurationError):
                make_schedule(*case)
            num_refused[case[0]] += 1
        else:
            assert as_text(make_schedule(*case)) == theirs, case
    interleaved = 3 * len([1 for p in (2, 3, 4, 8) for m in (*range(1, 10), 12, 16, 19, 24) if m % max(1, m // p)])
    fewer_than_stages = len([1 for p in (1, 2, 3, 4, 8) for m in (*range(1, 10), 12, 16, 19, 24) if m < 2 * p])
    assert num_refused == {
        "gpipe": 0,
        "looped_bfs": 0,
        "zbv": 0,
        "interleaved_1f1b": interleaved,
        "interleaved_zero_bubble": interleaved,
        "dualpipev": fewer_than_stages,
    }


def test_torch_accepts_our_own_orders(ask_torch):
    # torch's declared 1F1B order is wrong for the last stage (its check refuses it), so ours is put to its check
    names = ("1f1b", "envpipe", "envpipe:ratio=1.54", "envpipe:ratio=2,max_in_flight=5")
    schedules = [make_schedule(name, 4, num_microbatches) for name in names for num_microbatches in (4, 8, 13)]
    swapped = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    *ours, refusal = ask_torch(
        [*(("check", s.num_stages, s.num_microbatches, as_text(s)) for s in schedules), ("check", 2, 2, swapped)]
    )
    assert ours == [None] * len(schedules)
    assert "can't schedule" in refusal


def test_csv_files_of_torch_are_read(ask_torch, tmp_path):
    cases = {"zbv": (3, 4, 2), "dualpipev": (2, 5, 2), "interleaved_1f1b": (2, 4, 2)}
    ask_torch([("dump", TORCH_NAMES[n], *numbers, str(tmp_path / f"{n}.csv")) for n, numbers in cases.items()])
    assert "OVERLAP_F_B" in (tmp_path / "dualpipev.csv").read_text()
    for name, numbers in cases.items():
        assert load_schedule(tmp_path / f"{name}.csv").orders == make_schedule(name, *numbers).orders

"""What a rank says of another one that is gone; with real ranks in tests/strategy/trainer/test_launching.py."""

import re

import pytest

from tests.launch import run_script

SCRIPT = """
import logging, time
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.watch.rank_watch import RankWatch
from lightning_pfo.strategy.watch.stuck import Waits

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
hub, other = (RankWatch(rank, 2, Waits(lambda: None), grace_s=60) for rank in (0, 1))
other.connect(hub.listen("localhost", local_only=True))
hub.begin()
other.begin()
other.failed(ERROR)
while not hub._peers[1].error:  # closed before the other side has read all, a connection drops what is under way
    time.sleep(0.01)
"""
DIES = """
other.close_in_child()
assert "rank 1" in hub.death(wait_s=60)
"""


@pytest.mark.parametrize(("error", "level"), [("ValueError('a bug')", "ERROR"), ("ConfigurationError('typo')", "INFO")])
def test_mistakes_that_all_ranks_find_are_not_told_by_each_of_the_others(tmp_path, error, level):
    (script := tmp_path / "script.py").write_text(SCRIPT.replace("ERROR", error) + DIES)
    told = run_script(script).stdout
    assert told.startswith(f"{level} Rank 0: rank 1 "), told
    assert "failed with" in told


RAISES = """
from types import SimpleNamespace
from lightning_pfo.strategy.trainer.launchers import _guarded

strategy = SimpleNamespace(rank_watch=hub, save_only_together=lambda trainer, wait_s: None)

def run():
    raise RAISED

try:
    _guarded(SimpleNamespace(strategy=strategy), run)
except Exception as error:
    print("raised", type(error).__name__)
"""


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ("ValueError('a bug')", "ValueError"),
        ("ValueError('of its own, since the other is gone')", "RankDiedError"),
        ("RuntimeError('Connection closed by peer')", "RankDiedError"),
    ],
)
def test_a_mistake_that_all_ranks_find_is_raised_by_each_also_where_another_has_ended(tmp_path, raised, expected):
    (script := tmp_path / "script.py").write_text(
        SCRIPT.replace("ERROR", raised if "Connection" in raised else "ValueError('a bug')")
        + DIES
        + RAISES.replace("RAISED", raised)
    )
    assert f"raised {expected}\n" in run_script(script).stdout


@pytest.mark.parametrize(
    ("error", "raised", "expected"),
    [
        ("ValueError('a bug')", "RuntimeError('Connection closed by peer')", "RankDiedError"),
        ("RuntimeError('a bug')", "RuntimeError('a bug')", "RuntimeError"),
        ("RuntimeError('Connection closed by peer')", "ValueError('a bug')", "ValueError"),  # there because of this one
    ],
)
def test_a_rank_that_has_failed_is_named_though_its_process_has_not_ended_yet(tmp_path, error, raised, expected):
    (script := tmp_path / "script.py").write_text(
        SCRIPT.replace("ERROR", error) + RAISES.replace("RAISED", raised).replace("__name__)", "__name__, error)")
    )
    output = run_script(script).stdout
    assert f"raised {expected} " in output
    assert ("failed with ValueError: a bug" in output) == (expected == "RankDiedError")


CALLS = """
import logging, time
from lightning_pfo.strategy.watch.rank_watch import RankDiedError, RankWatch
from lightning_pfo.strategy.watch.stuck import Waits

logging.basicConfig(level=logging.CRITICAL, format="%(levelname)s %(message)s")
broken = []
hub, other, third = (RankWatch(rank, 3, Waits(lambda: broken.append("off")), grace_s=60) for rank in range(3))
address = hub.listen("localhost", local_only=True)
other.connect(address)
third.connect(address)
for watch in (hub, other, third):
    watch.begin()
    watch.done()
    with watch.call():
        pass

def until(condition):
    while not condition():
        time.sleep(0.01)
"""
LATE = """
with hub.call(), other.call(), third.call():  # the end comes while others are in the call, of which it has seen the end
    hub._calls.completed += 1
    hub._tell(event="called", calls=hub._calls.completed)
    hub.end(None)
    until(lambda: third._calls._ends and other._calls._ends)
    time.sleep(3)
print("ended well", broken)
try:
    with third.call():
        pass
except RankDiedError as error:
    print("raised", error)
"""
BROKEN_OFF = """
try:
    with third.call():
        other.end(ValueError("a bug"))
        until(lambda: broken)
        raise ValueError("Default process group has not been initialized")
except RankDiedError as error:
    print("raised", error)
"""
STUCK = """
with third.call():
    other.close_in_child()
    time.sleep(600)
"""


def test_what_is_called_together_between_runs_misses_only_ranks_that_had_not_come_to_its_end(tmp_path):
    (script := tmp_path / "script.py").write_text(CALLS + LATE)
    told = run_script(script).stdout
    assert "ended well []" in told
    assert "raised rank 0 has ended (if by an error, its own output has that)." in told


def test_calls_that_wait_for_others_are_broken_off_where_a_rank_has_ended(tmp_path):
    (script := tmp_path / "script.py").write_text(CALLS + BROKEN_OFF)
    told = run_script(script).stdout
    assert "raised rank 1 (pid " in told
    assert "has ended with ValueError: a bug." in told


def test_a_process_that_waits_in_such_a_call_all_the_same_is_ended(tmp_path):
    (script := tmp_path / "script.py").write_text(CALLS.replace("grace_s=60", "grace_s=0.5") + STUCK)
    told = run_script(script, expect_success=False)
    assert told.returncode == 1
    assert "CRITICAL Rank 2 is ended, because rank 1 (pid " in told.stdout


JOINS_LATE = """
import time
from lightning_pfo.strategy.watch.rank_watch import RankDiedError, RankWatch
from lightning_pfo.strategy.watch.stuck import Waits

def until(condition):
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)

hub, other, third = (RankWatch(rank, 3, Waits(lambda: None), grace_s=60) for rank in range(3))
address = hub.listen("localhost", local_only=True)
other.connect(address)
"""
FAILED = """
for watch in (hub, other):
    watch.begin()
other.failed(ValueError("a bug"))
until(lambda: hub._peers[1].error)
third.connect(address)
third.begin()
print("told", third.failed(RuntimeError("Connection closed by peer"), wait_s=30))
"""
HAS_ENDED = """
other.end(ValueError("a bug"))
until(lambda: hub._calls._ends)
third.connect(address)
until(lambda: third._calls._ends)
try:
    with third.call():
        pass
except RankDiedError as error:
    print("told", error)
"""


FAILED_BEFORE = FAILED.replace("third.begin()", "until(lambda: third._failures_ahead); third.begin()")


@pytest.mark.parametrize("leaves", [FAILED, FAILED_BEFORE, HAS_ENDED])
def test_who_joins_late_is_told_what_others_were_told_before(tmp_path, leaves):
    (script := tmp_path / "script.py").write_text(JOINS_LATE + leaves)
    assert re.search(r"told rank 1 \(pid .*(failed|has ended) with ValueError: a bug", run_script(script).stdout)


ALL_BEGIN = """
third.connect(address)
until(lambda: len(hub._connections) == 2)
for watch in (hub, other, third):
    watch.begin()
"""
SAVE_TOGETHER = """
other.failed(ValueError("a bug"))
hub.failed(ValueError("a bug"))
print("with the third", hub.have_all_failed(0.1), other.have_all_failed(0.1))
third.failed(ValueError("a bug"))
print("all", *(watch.have_all_failed(30) for watch in (hub, other, third)))
for watch in (hub, other, third):
    watch.begin()
other.failed(ValueError("a bug"))
hub.failed(ValueError("a bug"))
third.close_in_child()
print("without the third", hub.have_all_failed(30), other.have_all_failed(30))
"""


def test_who_has_failed_knows_whether_all_others_have_in_the_same_run(tmp_path):
    (script := tmp_path / "script.py").write_text(JOINS_LATE + ALL_BEGIN + SAVE_TOGETHER)
    told = run_script(script).stdout
    assert "with the third False False" in told
    assert "all True True True" in told
    assert "without the third False False" in told


BEGINS_AGAIN = """
import threading
other.failed(ValueError("a bug of this one"))
began = threading.Thread(target=other.begin)
began.start()
began.join(0.5)
print("while all are there:", not began.is_alive())
hub.done()
began.join(0.5)
print("while the third is there:", not began.is_alive())
third.done()
began.join(30)
print("when all have left:", not began.is_alive())
for watch in (hub, third):
    watch.begin()
for watch in (hub, other, third):
    watch.done()
    watch.begin()
print("after runs that are done: at once")
"""


def test_who_has_failed_begins_again_when_others_have_left_that_run(tmp_path):
    """They may wait there for a rank that is in it no more, and would take what it does next for what it did not do."""
    (script := tmp_path / "script.py").write_text(JOINS_LATE + ALL_BEGIN + BEGINS_AGAIN)
    assert run_script(script).stdout.splitlines() == [
        "while all are there: False",
        "while the third is there: False",
        "when all have left: True",
        "after runs that are done: at once",
    ]

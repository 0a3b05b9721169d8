"""What a rank says of another one that is gone; with real ranks in tests/strategy/trainer/test_launching.py."""

import pytest

from tests.launch import run_script

SCRIPT = """
import logging, time
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.watch.rank_watch import RankWatch

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
hub, other = (RankWatch(rank, 2, lambda: None, grace_s=60) for rank in (0, 1))
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
    told = run_script(script, timeout_s=60).stdout
    assert told.startswith(f"{level} Rank 0: rank 1 "), told
    assert "failed with" in told


RAISES = """
from types import SimpleNamespace
from lightning_pfo.strategy.trainer.launchers import _guarded

def run():
    raise RAISED

try:
    _guarded(SimpleNamespace(strategy=SimpleNamespace(rank_watch=hub)), run)
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
    assert f"raised {expected}\n" in run_script(script, timeout_s=60).stdout


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
    output = run_script(script, timeout_s=60).stdout
    assert f"raised {expected} " in output
    assert ("failed with ValueError: a bug" in output) == (expected == "RankDiedError")

import pytest

from tests.launch import run_script


@pytest.mark.parametrize(
    ("waiting", "breaking_off", "status"),
    [
        ("time.sleep(60)", "pass", 143),  # as if waiting for another rank
        ("signal.pause()", "os.kill(os.getpid(), signal.SIGUSR1)", 5),  # what waits fails, and the process ends itself
        ("[time.sleep(0.01) or done.append(1) for _ in range(80)]", "os._exit(1)", 0),  # others come
    ],
)
def test_who_is_asked_to_end_and_waits_for_others_ends(tmp_path, waiting, breaking_off, status):
    script = tmp_path / "script.py"
    script.write_text(STUCK.replace("WAITING", waiting).replace("BREAKING_OFF", breaking_off))
    assert run_script(script, expect_success=False, timeout_s=50).returncode == status


STUCK = """
import os, signal, sys, time
from lightning_pfo.strategy.watch.stuck import end_if_stuck


def break_off():
    BREAKING_OFF


signal.signal(signal.SIGUSR1, lambda *_: os._exit(5))
done = []
end_if_stuck(break_off, {__file__}, lambda: len(done), patience_s=0.3, grace_s=0.3)
WAITING
"""

"""What is checked before a schedule is used; the checks themselves are tested where they are made."""

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules import p2p
from lightning_pfo.core.schedules.p2p import Receive, Send, Transfer
from lightning_pfo.core.schedules.validation import make_checked_schedule


def test_a_schedule_that_passes():
    assert make_checked_schedule("zbv", 2, 4).num_stages == 4
    assert make_checked_schedule("1f1b", 4, 8, max_in_flight=4).num_microbatches == 8


def test_too_many_microbatches_in_flight():
    with pytest.raises(ConfigurationError, match=r"At most 3 .* 0F3 is number 4 on rank 0[\s\S]*\[0F3\]"):
        make_checked_schedule("gpipe", 2, 4, max_in_flight=3)


def test_an_incomplete_file(tmp_path):
    path = tmp_path / "order.txt"
    path.write_text("0F0 0F1 0B0\n1F0 1B0 1F1 1B1\n")
    with pytest.raises(ConfigurationError, match=r"lacks one at stage 0, microbatch 1[\s\S]*\[0F1\]"):
        make_checked_schedule(str(path), 2, 2)


def test_transfers_that_hang(monkeypatch):
    # EnvPipe's: rank 0 waits for the first gradient before it sends the activation that rank 1 needs first
    def transfer(before, after, source, destination):
        return Transfer(Instruction.parse(before), Instruction.parse(after), source, destination)

    a0, a1, g0 = transfer("0F0", "1F0", 0, 1), transfer("0F1", "1F1", 0, 1), transfer("1B0", "0B0", 1, 0)
    program = (
        (a0.producer, Send(a0), a1.producer, Receive(g0), Send(a1), g0.consumer),
        (Receive(a0), a0.consumer, Receive(a1), a1.consumer, g0.producer, Send(g0)),
    )
    monkeypatch.setattr(p2p, "p2p_program", lambda schedule: program)
    with pytest.raises(ConfigurationError, match=r"deadlock at receive 1B0->0B0; receive 0F1->1F1\.") as caught:
        make_checked_schedule("gpipe", 2, 2)
    assert "[0B0]" in str(caught.value)
    assert "[1F1]" in str(caught.value)

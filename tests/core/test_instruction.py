import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.core.instruction import Instruction, InstructionType


@given(st.integers(0, 99), st.sampled_from(InstructionType), st.integers(0, 9999))
def test_text_form_reads_back(stage, kind, microbatch):
    instruction = Instruction(stage, kind, microbatch)
    assert Instruction.parse(str(instruction)) == instruction


def test_text_form():
    assert str(Instruction(2, InstructionType.FORWARD, 0)) == "2F0"


@pytest.mark.parametrize("text", ["", "2F", "F0", "2X0", "-1F0", "2F0 ", "2f0"])
def test_malformed_text_is_refused(text):
    with pytest.raises(ValueError, match="such as 2F0"):
        Instruction.parse(text)


def test_profile_names_read_back():
    names = ["forward", "backward", "input_gradient", "weight_gradient"]
    assert [kind.profile_name for kind in InstructionType] == names
    assert [InstructionType.from_profile_name(name) for name in names] == list(InstructionType)
    with pytest.raises(ValueError, match="use one of forward, backward"):
        InstructionType.from_profile_name("load")

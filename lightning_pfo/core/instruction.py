"""Instructions: the unit that is executed, measured and given a clock."""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple, TypeAlias

from lightning_pfo.core.wording import shortened

_TEXT = re.compile(r"([0-9]{1,20})([FBIW])([0-9]{1,20})")


class InstructionType(str, Enum):
    """What an instruction computes. The values are the one-letter forms used in `2F0`."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    # Enum hashes by name in Python; large tables are keyed by instructions.
    __hash__ = str.__hash__

    @property
    def profile_name(self) -> str:
        """The name in the `instruction` column of a profile, e.g. `forward`."""
        return self.name.lower()

    @classmethod
    def from_profile_name(cls, name: str) -> InstructionType:
        """Return the type whose `profile_name` is `name`, in capitals or not.

        Raises:
            ValueError: If no type has that name.
        """
        for kind in cls:
            if kind.profile_name == name.lower():
                return kind
        raise ValueError(
            f"Unknown instruction name {shortened(name)}; use one of {', '.join(kind.profile_name for kind in cls)}."
        )


class Instruction(NamedTuple):
    """One computation of one microbatch on one stage; its text form is `2F0` (stage 2, forward, microbatch 0).

    A named tuple, as schedules are large tables of them: it is made and hashed several times as fast as a dataclass.
    """

    stage: int
    type: InstructionType
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.type.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """Read the text form back.

        Raises:
            ValueError: If `text` is not `<stage><F|B|I|W><microbatch>`.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"An instruction reads <stage><F|B|I|W><microbatch>, such as 2F0; got {shortened(text)}.")
        return cls(int(match[1]), InstructionType(match[2]), int(match[3]))


Orders: TypeAlias = tuple[tuple[Instruction, ...], ...]
"""One tuple of instructions per rank, in execution order."""

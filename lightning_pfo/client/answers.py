"""What form the server's answers have; one of another form is as good as none.

Whatever answers in place of our server (a proxy, a server of another kind or release) must not end a training, so
answers are looked into here alone, and nothing is converted that is not what the protocol says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_pfo.client.server_link import Answer, ServerAwayError
from lightning_pfo.core.wording import shortened

_LARGEST, _LARGEST_MHZ = 2**53, 100_000
_LONGEST_NAME = 4_000


@dataclass(frozen=True)
class ReceivedPlan:
    """A plan as the server has sent it.

    Attributes:
        version: 1, 2, ...; 0 before there is one.
        from_step: From this step on it is followed.
        row: Names of instructions and clocks in MHz.
        purpose: `scan` if it is there to be measured, else `plan`.
        label: How it was chosen.
    """

    version: int = 0
    from_step: int = 0
    row: tuple[tuple[str, int], ...] = ()
    purpose: str = "plan"
    label: str = ""


def job_name(content: Any) -> str:
    """The name of a job that was registered.

    Raises:
        ServerAwayError: If the answer is none.
    """
    if isinstance(content, str) and 0 < len(content) <= _LONGEST_NAME and content.isprintable():
        return content
    raise _other_form("A job that is registered gets a name, a text", content)


def received_plan(answer: Answer) -> ReceivedPlan | None:
    """The plan that an answer has; None if there is no new one.

    Raises:
        ServerAwayError: If it is neither.
    """
    if answer.status == 204:
        return None
    match answer.content:
        case {"version": version, "from_step": step, "frequencies": list(row), "purpose": str(), "label": str()} if (
            _is_whole(version, 1, _LARGEST) and _is_whole(step, 0, _LARGEST) and all(map(_is_clock, row))
        ):
            plan = answer.content
            return ReceivedPlan(version, step, tuple((name, mhz) for name, mhz in row), plan["purpose"], plan["label"])
    raise _other_form(
        "A plan has version (1 or more), from_step, purpose, label, and frequencies such as [['forward', 1410], ...]",
        answer.content,
    )


def promised_step(answer: Answer) -> int:
    """The step up to which nothing else changes.

    Raises:
        ServerAwayError: If what the answer says of it is no number.
    """
    text = answer.headers.get("unchanged-until-step", "0")
    if text.isdecimal() and len(text) < len(str(_LARGEST)):
        return int(text)
    raise _other_form("The header Unchanged-Until-Step is the number of a step", text)


def _is_clock(entry: Any) -> bool:
    match entry:
        case [str(), mhz]:
            return _is_whole(mhz, 0, _LARGEST_MHZ)
    return False


def _is_whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most  # JSON's true is a number to Python


def _other_form(rule: str, received: Any) -> ServerAwayError:
    return ServerAwayError(f"{rule}; the server sends {shortened(received)}. Is `lightning-pfo serve` at server_url?")

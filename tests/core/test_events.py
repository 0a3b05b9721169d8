from itertools import permutations

import pytest

from lightning_pfo.core.events import EventEmitter, InstructionEvent, InstructionListener
from lightning_pfo.core.instruction import Instruction


class Recorder(InstructionListener):
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def on_instruction_begin(self, event):
        self.seen.append(f"{self.name} begin {event.instruction}")

    def on_instruction_end(self, event):
        self.seen.append(f"{self.name} end {event.instruction}")


@pytest.mark.parametrize("order", list(permutations(["outermost", "outer", "inner", "innermost"])))
def test_listeners_nest_and_the_innermost_and_outermost_stay_there(order):
    """Whoever comes first; those between nest in the order in which they came."""
    seen = []
    emitter = EventEmitter()
    assert not emitter
    for name in order:
        emitter.add(Recorder(name, seen), innermost=name == "innermost", outermost=name == "outermost")
    event = InstructionEvent(Instruction.parse("0F0"), 0)
    emitter.instruction_begin(event)
    emitter.instruction_end(event)
    between = [name for name in order if name in ("outer", "inner")]
    nested = ["outermost", *between, "innermost"]
    assert [line.split()[0] for line in seen] == [*nested, *nested[::-1]]


def test_iterations_begin_outermost_and_end_there():
    seen = []

    class Iterations(InstructionListener):
        def __init__(self, name):
            self.name = name

        def on_iteration_begin(self, iteration):
            seen.append(f"{self.name} begin {iteration}")

        def on_iteration_end(self, iteration):
            seen.append(f"{self.name} end {iteration}")

    emitter = EventEmitter()
    emitter.add(Iterations("between"))
    emitter.add(Iterations("outermost"), outermost=True)
    emitter.iteration_begin(3)
    emitter.iteration_end(3)
    assert seen == ["outermost begin 3", "between begin 3", "between end 3", "outermost end 3"]


@pytest.mark.parametrize("place", [{}, {"innermost": True}, {"outermost": True}])
def test_removed_listeners_hear_nothing(place):
    seen = []
    emitter = EventEmitter()
    listener = Recorder("one", seen)
    emitter.add(listener, **place)
    assert emitter
    emitter.remove(listener)
    emitter.remove(listener)
    emitter.instruction_begin(InstructionEvent(Instruction.parse("0F0"), 0))
    assert not seen
    assert not emitter


def test_the_base_listener_does_nothing():
    emitter = EventEmitter()
    emitter.add(InstructionListener())
    event = InstructionEvent(Instruction.parse("0F0"), 0)
    emitter.iteration_begin(0)
    emitter.instruction_begin(event)
    emitter.instruction_end(event)
    emitter.iteration_end(0)

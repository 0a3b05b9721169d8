from lightning_pfo.core.events import EventEmitter, InstructionEvent, InstructionListener
from lightning_pfo.core.instruction import Instruction


class Recorder(InstructionListener):
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def on_instruction_begin(self, event):
        self.seen.append(f"{self.name} begin {event.instruction}")

    def on_instruction_end(self, event):
        self.seen.append(f"{self.name} end {event.instruction}")


def test_listeners_nest_and_the_innermost_stays_inside():
    seen = []
    emitter = EventEmitter()
    assert not emitter
    emitter.add(Recorder("gpu", seen), innermost=True)
    outer, inner = Recorder("outer", seen), Recorder("inner", seen)
    emitter.add(outer)
    emitter.add(inner)
    event = InstructionEvent(Instruction.parse("0F0"), 0)
    emitter.instruction_begin(event)
    emitter.instruction_end(event)
    assert [line.split()[0] for line in seen] == ["outer", "inner", "gpu", "gpu", "inner", "outer"]


def test_removed_listeners_hear_nothing():
    seen = []
    emitter = EventEmitter()
    listener = Recorder("one", seen)
    emitter.add(listener)
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

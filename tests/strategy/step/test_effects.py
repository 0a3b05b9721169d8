"""What microbatches change of a module, put together as one batch."""

from collections import deque, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.effects.attributes import Attributes
from lightning_pfo.strategy.step.effects.outward.calls import Outlets, redirected
from lightning_pfo.strategy.step.effects.parcel import pack, unpack


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.count, self.samples, self.mean, self.text, self.none = 5, 10, 2.0, "a", None
        self.outs, self.ids, self.window = [torch.tensor(0.0)], [1], deque([1, 2], maxlen=2)
        self.nested = {"kept": 1, "inner": {"values": []}}
        self.correct, self.histogram = torch.tensor(3), np.zeros(2, dtype=np.int64)
        self.all_outs, self.pair, self.rows = [torch.tensor(0.0)], (3.0, torch.tensor(0.0)), torch.tensor([[9.0, 9.0]])
        self.array, self.none_yet = np.array([9.0]), torch.zeros(0)
        self.names, self.latest = {"old"}, deque([1.0], maxlen=3)
        self.register_buffer("running", torch.tensor([1.0, 1.0]))
        self.large = torch.ones(2**17)


def step(module, values):
    """A step on a microbatch."""
    module.count += 1
    module.samples += len(values)
    module.mean += sum(values) / len(values)
    module.text, module.none = f"{values}", values[0]
    module.outs.append(torch.tensor(values).mean())
    module.ids.extend(values)
    module.window.append(sum(values) / len(values))
    module.nested["inner"]["values"].append(torch.tensor(values))
    module.correct += sum(value > 2 for value in values)
    module.histogram[0] += len(values)
    module.running = module.running + torch.tensor(values).mean()
    module.large = 0.5 * module.large + torch.tensor(values).mean()
    module.new = torch.tensor(values)
    module.all_outs = module.all_outs + [torch.tensor(values).mean()]  # noqa: RUF005 (as it is written)
    module.pair = (*module.pair, torch.tensor(values).mean())
    module.rows = torch.cat([module.rows, torch.tensor([[value, 1.0] for value in values])])
    module.array = np.concatenate([module.array, values])
    module.names.update(map(str, values))
    module.latest.extend(values)
    module.none_yet = torch.cat([module.none_yet, torch.tensor(values)])


def state(module):
    found = {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}
    return {**found, "running": module.running}


def test_microbatches_change_a_module_as_their_batch_does():
    expected, module = Module(), Module()
    step(expected, [1.0, 2.0, 3.0, 4.0])
    attributes = Attributes(module)
    before = repr(state(module))
    changes = []
    for values in ([1.0, 2.0], [3.0, 4.0]):
        step(module, values)
        changes.append(attributes.take_changes())
        assert repr(state(module)) == before
    attributes.apply(attributes.merged(changes, (2, 2), (0.5, 0.5)))
    found, wanted = state(module), state(expected)
    assert found.pop("names") == wanted.pop("names")  # in any order
    for name in ("text", "none"):  # of what has no merged form, the last one stays; numbers are averaged
        found.pop(name), wanted.pop(name)
    assert repr(found) == repr(wanted)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.hits, self.seen, self.total = 3, 4, 1.0


@pytest.mark.parametrize("hits", [(1, 1), (1, 0, 1)])
def test_sums_beside_a_count_of_samples_are_sums_where_each_part_has_one_hit_and_where_some_have_none(hits):
    module, rules, changes = Counting(), Rules(), []
    rules.learn("self.hits as it grows", 1, 2, 1, 3)
    attributes = Attributes(module)
    for hit in hits:
        module.hits, module.seen = module.hits + hit, module.seen + 2
        module.total = module.total + 0.5 * hit if hit else module.total
        changes.append(attributes.take_changes())
    number = len(hits)
    attributes.apply(attributes.merged(changes, (2,) * number, (1 / number,) * number, rules))
    assert (module.hits, module.seen, module.total) == (5, 4 + 2 * number, 2.0)


def test_large_changes_are_left_where_they_are(caplog):
    module = Module()
    attributes = Attributes(module)
    module.text = torch.zeros(2, 2**20)
    changes = attributes.take_changes()
    assert list(attributes.dear(changes)) == [("text",)]
    assert "left 8 MiB in self.text" in caplog.text


@pytest.mark.parametrize("device", [torch.device("cpu"), None])
def test_parcels_hold_anything(device):
    value = {
        "numbers": [1, 2.5, True, 2**60, torch.tensor(1.5), torch.tensor(3)],
        "tensors": (torch.ones(2, 3).t(), torch.zeros(0), torch.tensor([True]), torch.ones(1, dtype=torch.complex64)),
        "rest": ["text", None, np.arange(2), {1, 2}],
    }
    parcel = pack(value, device)
    assert len(parcel.numbers) == (3 if device else 0)
    numbers = torch.tensor([float(number) for number in parcel.numbers], dtype=torch.float64)
    assert repr(unpack(parcel.outline, numbers, parcel.tensors, torch.device("cpu"))) == repr(value)
    assert pack(value, device).outline == parcel.outline


def test_what_cannot_be_sent_is_named(caplog):
    parcel = pack([1.0, lambda: None], torch.device("cpu"))
    assert unpack(parcel.outline, torch.ones(1), [], torch.device("cpu")) == [1.0, None]
    assert "a function behind that other ranks do not get" in caplog.text


def test_what_cannot_be_sent_is_absent_from_a_dict_and_none_in_an_attribute():
    """A cache (einops' backends) is looked into again where an item is absent."""

    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache, self.both, self.tool = {"kept": 1}, [], "before"

        def fill(self):
            self.cache["new"] = self.cache[str] = self.tool = lambda: 2
            self.both.append((3, lambda: 2))

    sender, receiver = Caches(), Caches()
    attributes = Attributes(sender)
    attributes.enter()
    sender.fill()
    parcel = pack({"changes": attributes.take_changes()}, None)
    received = unpack(parcel.outline, torch.zeros(0), parcel.tensors, torch.device("cpu"))
    at_receiver = Attributes(receiver)
    at_receiver.enter()
    at_receiver.apply(received["changes"])
    assert (receiver.cache, receiver.both, receiver.tool) == ({"kept": 1}, [(3, None)], None)


class Trainer:
    loggers, predicting = (), False

    def save_checkpoint(self, path):
        """As Lightning's."""


def test_calls_are_the_users_own_again_after_a_step():
    """Also where the user has put something else in their place, as a mock."""
    module, notes, mine = nn.Module(), [], object()
    module.trainer = trainer = Trainer()
    for own in ({}, {"save_checkpoint": mine}):
        vars(trainer).update(own)
        with redirected(Outlets(module), print, notes.append):
            trainer.save_checkpoint("a.ckpt")
            assert module.log is print
        assert vars(trainer) == own
        assert "log" not in vars(module)
    assert notes == [((("attribute", "trainer"), ("attribute", "save_checkpoint")), ("a.ckpt",), {})] * 2


def test_what_has_several_names_is_known_by_the_same_in_whichever_order_they_were_given():
    places = []
    for names in ("abc", "cab"):  # as those of a set of texts, in two processes
        module, shared, keys = nn.Module(), [], dict.fromkeys(names)
        for name in names:
            setattr(module, name, shared)
            keys[name] = (inner := module.__dict__.setdefault("inner", [0]))
        module.by_name = keys
        shared.append(inner)
        places.append({path for path, holder in Attributes(module)._holders.items() if holder is shared})
    assert places == [{("a",)}, {("a",)}]


def test_a_container_of_a_class_that_others_do_not_find_is_refused_with_a_way_out():
    fields = namedtuple("fields", "a b")  # of this function
    with pytest.raises(ConfigurationError, match=r"looked for by name: define them at the top of a module"):
        pack({"both": fields(torch.zeros(2), "text")}, torch.device("cpu"))

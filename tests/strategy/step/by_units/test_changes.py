"""What a call has done is done on ranks that have not run it."""

import threading
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.forms.left import Kept
from lightning_pfo.strategy.model.units import Unit
from lightning_pfo.strategy.step.by_units.changes import Given, Told

CPU = torch.device("cpu")


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Identity()
        self.kept, self.log = None, [torch.zeros(1)]


class State:
    def __init__(self):
        self.calls, self.many, self.again, self.table = 1, 1, [1, 1], {"a": torch.ones(2)}
        self.queue, self.names, self.pair = deque([1], maxlen=3), {"x"}, (torch.ones(1), [0])
        self.old = 1


def arguments():
    return (torch.ones(3), [torch.ones(1)], State(), {"key": torch.zeros(2)}), {
        "named": SimpleNamespace(x=torch.ones(1))
    }


def change(part, x, some, state, table, named):
    x.mul_(2)
    some.append(x.sum())
    state.calls, state.many, state.again = 2, 3, [2, 2, 3]
    state.table["b"] = state.table.pop("a") + 1
    state.queue.append(5)
    state.names.add("y")
    state.pair = (torch.full((1,), 4.0), [1])
    del state.old
    state.new = {"deep": [x, torch.full((2,), 7.0)]}
    table.clear()
    named.x = named.x * 3
    part.kept = torch.full((2,), 9.0)
    part.log.append(torch.full((1,), 8.0))
    return {"result": x.sum(), "given": x, "state": state, "items": (1, "two", None)}


def plain(value, done=()):
    """Values that can be compared."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, set):
        return sorted(value)
    return plain(vars(value)) if hasattr(value, "__dict__") else value


def both(function, make=arguments):
    """What a call returns here and elsewhere, with the arguments and parts of each."""
    parts = [Part(), Part()]
    of_ranks = []
    given = [make(), make()]
    looks = [
        Given(each, {id(module): module for module in part.modules()}) for each, part in zip(given, parts, strict=True)
    ]
    args, kwargs = given[0]
    with Kept(parts[0]) as kept:
        result = function(parts[0], *args, **kwargs)
    told = looks[0].told(result, kept.take_left(), Unit("part", parts[0]))
    sent = Told(told.data, [tensor.clone() for tensor in told.tensors])
    other = looks[1].after(sent, Unit("part", parts[1]), CPU)
    for each, returned, part in zip(given, (result, other), parts, strict=True):
        of_ranks.append(SimpleNamespace(given=each, returned=returned, part=part, told=told))
    return of_ranks


def test_all_that_it_changes_and_leaves_is_there():
    here, there = both(change)
    assert plain(there.given) == plain(here.given)
    assert plain(there.returned) == plain(here.returned)
    assert plain(there.part.kept) == [9.0, 9.0]
    assert plain(there.part.log) == plain(here.part.log) == ["list", [0.0], [8.0]]
    assert there.returned["given"] is there.given[0][0]  # what is given stays who it is
    assert there.returned["state"] is there.given[0][2]
    assert there.returned["state"].new["deep"][0] is there.given[0][0]
    assert there.given[0][2].queue.maxlen == 3


def test_what_is_not_changed_is_not_sent():
    here, there = both(lambda part, x, *_, named: (x, x + 1))
    assert there.returned[0] is there.given[0][0]
    assert [tensor.tolist() for tensor in here.told.tensors] == [[2.0, 2.0, 2.0]]


def test_modules_and_functions_are_told_apart_by_their_places():
    def make():
        return (lambda: 1, torch.ones(1)), {}

    _, there = both(lambda part, function, x: (part.inner, function, x), make)
    assert there.returned[0] is there.part.inner
    assert there.returned[1] is there.given[0][0]


class LayerCache:
    """As those of libraries."""

    def __init__(self):
        self.keys, self.steps = None, 0

    def update(self, keys):
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], -1)
        self.steps += 1


def test_of_a_cache_of_a_library_others_know_the_form(monkeypatch):
    monkeypatch.setattr(LayerCache, "__module__", "transformers.cache_utils")
    monkeypatch.setattr("transformers.cache_utils.LayerCache", LayerCache, raising=False)

    def call(part, cache):
        cache.update(torch.full((2, 3), 5.0))

    here, there = both(call, lambda: ((LayerCache(),), {}))
    mine, other = here.given[0][0], there.given[0][0]
    assert other.steps == mine.steps == 1
    assert (other.keys.shape, other.keys.dtype) == (mine.keys.shape, mine.keys.dtype)
    assert not here.told.tensors
    assert not other.keys.any()


def test_what_cannot_be_sent_is_named():
    with pytest.raises(ConfigurationError, match=r"'part'.*cannot be sent.*lock.*Let it return tensors"):
        both(lambda part, *_, named: threading.Lock())


def test_arguments_that_cannot_be_looked_into_stay_as_they_are():
    _, there = both(lambda part, lock, x: x + 1, lambda: ((threading.Lock(), torch.ones(1)), {}))
    assert there.returned.tolist() == [2.0]

"""Steps whose layers return objects and containers of many kinds, or write into them; see `cases`."""

import functools
import types
import weakref
from collections import ChainMap, UserDict, UserList, defaultdict, deque

import torch

from tests.strategy.model.tracing.cases import Block, case


class Box:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("__hidden", "value")

    def __init__(self, value):
        self.value, self.__hidden = value, value.detach()


class OwnDict(dict):
    pass


class OwnDefaults(defaultdict):
    pass


class OwnList(list):
    pass


class OwnTuple(tuple):
    __slots__ = ()


class Node:
    """Leads to itself, and its part to it."""

    def __init__(self, value):
        self.me, self.part = self, types.SimpleNamespace(value=value, whole=self, weakly=weakref.ref(self))


def of_node(node):
    assert node.me is node.part.whole is node.part.weakly() is node
    return node.part.value


KINDS = {
    "object_in_object": (lambda v: Box(Box(v)), lambda o: o.value.value),
    "objects_in_list": (lambda v: Box([Box(v)]), lambda o: o.value[0].value),
    "lists_in_dict": (lambda v: Box({"a": [(v, 1)]}), lambda o: o.value["a"][0][0]),
    "slots": (Slotted, lambda o: o.value),
    "own_dict": (lambda v: OwnDict(v=v), lambda o: o["v"]),
    "own_defaults": (lambda v: OwnDefaults(list, {"v": v}), lambda o: o["v"] + sum(o["none"])),
    "own_list": (lambda v: OwnList([v]), lambda o: o[0]),
    "own_tuple": (lambda v: OwnTuple([v]), lambda o: o[0]),
    "user_dict": (lambda v: UserDict(v=v), lambda o: o["v"]),
    "user_list": (lambda v: UserList([v]), lambda o: o[0]),
    "chain": (lambda v: ChainMap({}, {"v": v}), lambda o: o["v"]),
    "proxy": (lambda v: types.MappingProxyType({"v": v}), lambda o: o["v"]),
    "namespaces": (lambda v: types.SimpleNamespace(a=types.SimpleNamespace(v=v)), lambda o: o.a.v),
    "partial": (lambda v: functools.partial(torch.add, v, alpha=2.0), lambda o: o(1.0)),
    "node": (Node, of_node),
}


class Packs(Block):
    """Returns a loss of its own in objects of all kinds; is given some too."""

    def forward(self, x, packed):
        y = super().forward(x)
        for name, (_, unpack) in KINDS.items():
            y = y + 0.1 * unpack(packed[name])
        return x + y, {name: pack(y.square().mean()) for name, (pack, _) in KINDS.items()}


@case(layer=Packs, num_layers=4)
def objects_of_many_kinds(net, x, y):
    x = net.stem(x)
    packed = {name: pack(x.mean()) for name, (pack, _) in KINDS.items()}
    for layer in net.layers:
        x, packed = layer(x, packed)
    return net.loss(x, y) + sum(unpack(packed[name]) for name, (_, unpack) in KINDS.items())


class Context:
    """What a step hands to all of its layers."""

    def __init__(self):
        self.by_name = defaultdict(list)
        self.state = types.SimpleNamespace(losses=[], total=0.0, first=True)
        self.own = OwnDict()
        self.last = deque(maxlen=3)
        self.plain = UserDict(losses=[])
        self.boxes = [Box(None) for _ in range(4)]
        self.count = 0


class WritesDeeply(Block):
    def forward(self, x, context):
        y = super().forward(x)
        loss = y.square().mean()
        context.by_name["aux"].append(loss)
        context.state.losses.append(loss * 0.5)
        context.state.total = context.state.total + loss
        context.state.__dict__.pop("first", None)
        context.own.setdefault("aux", []).append(loss * 0.1)
        context.last.append(y)
        context.plain["losses"].append(y.mean())
        context.boxes[context.count].value = y
        context.count += 1
        return x + y


@case(layer=WritesDeeply, num_layers=4)
def layers_that_write_deep_into_an_object(net, x, y):
    x, context = net.stem(x), Context()
    state, own = context.state, context.own
    for layer in net.layers:
        x = layer(x, context)
    assert state is context.state
    assert own is context.own
    assert not hasattr(state, "first")
    lists = context.by_name["aux"], state.losses, own["aux"], context.plain["losses"]
    return (
        net.loss(x, y)
        + sum(map(sum, lists))
        + state.total
        + sum(each.sum() for each in context.last)
        + sum(box.value.std() for box in context.boxes)
    )


class Losses:
    __slots__ = ("found",)

    def __init__(self):
        self.found = []


class Known:
    """What all layers know."""

    def __init__(self):
        self.last, self.slots, self.plain, self.total = deque(), Losses(), UserDict(losses=[]), torch.zeros(())
        self.a = types.SimpleNamespace(b=types.SimpleNamespace(c=types.SimpleNamespace(losses=[])))

    def clear(self):
        self.__init__()


class KeepsInMany(Block):
    """Leaves losses of its own in buffers and in what all layers know."""

    known = Known()

    def __init__(self):
        super().__init__()
        self.register_buffer("aux", torch.zeros(()))
        self.register_buffer("none_at_first", None, persistent=False)
        self.register_buffer("unread", torch.zeros(()))
        self.parent = []

    def forward(self, x):
        y = super().forward(x)
        self.aux, self.none_at_first, self.unread = y.square().mean(), y.abs().mean(), y.detach().mean()
        self.known.last.append(y.std())
        self.known.slots.found.append(y.amax())
        self.known.plain["losses"].append(y.amin())
        self.known.total = self.known.total + y.mean()
        self.known.a.b.c.losses.append(y.sum())
        self.parent[0].found.append(y.var())
        return y


@case(layer=KeepsInMany, num_layers=4)
def losses_that_layers_keep_in_many_places(net, x, y):
    net.found, known = [], KeepsInMany.known
    for layer in net.layers:
        layer.parent = [net]
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    lists = known.last, known.slots.found, known.plain["losses"], known.a.b.c.losses, net.found
    loss = net.loss(x, y) + sum(map(sum, lists)) + known.total
    loss = loss + sum(layer.aux + 0.5 * layer.none_at_first for layer in net.layers)
    known.clear()
    net.found = []
    for layer in net.layers:
        layer.parent, layer.aux, layer.none_at_first = [], torch.zeros(()), None  # they could not be copied
    return loss


class AddsInPlace(Block):
    """Adds losses of its own to what it is given, and to what all layers know, in place."""

    known = types.SimpleNamespace(total=0.0, count=torch.zeros(()))

    def forward(self, x, total, rows, context):
        y = super().forward(x)
        total += y.square().mean()
        rows[context.count] = y.mean()
        context.total += y.abs().mean()
        context.count += 1
        self.known.total += y.std()
        self.known.count += 1.0
        return y


@case(layer=AddsInPlace, num_layers=4)
def layers_that_add_in_place(net, x, y):
    total, rows, known = torch.zeros(()), torch.zeros(4), AddsInPlace.known
    context = types.SimpleNamespace(total=torch.zeros(()), count=0)
    known.total, known.count = 0.0, torch.zeros(())
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x, total, rows, context)
    loss = net.loss(x, y) + total + rows.sum() + context.total + known.total * known.count
    known.total, known.count = 0.0, torch.zeros(())
    return loss

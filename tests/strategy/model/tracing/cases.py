"""Steps of small modules that a trace has to get right, or refuse; each on a batch `x, y` of random numbers."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
CASES = {}

SHARES = "share memory cross the boundary|changed in place by what one stage computes"
OTHERWISE = "runs otherwise than in the trace"
NOT_SENT = "was not sent"
LEAF = "a view of a leaf Variable"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).tanh()


class InPlace(nn.Module):
    """Begins by changing its argument."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x.mul_(0.5).relu_())


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair):
        x, mask = pair
        return self.linear(x) * mask, mask


class Mapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        x = self.linear(values["x"])
        return {"x": x, "sum": values["sum"] + x, "name": "layer", "none": None}


@dataclass
class Output:
    x: torch.Tensor
    aux: torch.Tensor


class WithAux(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x).tanh()
        return x, x.square().mean()


class Writes(Block):
    """Writes into the dict that it is given, and into a list in it."""

    def forward(self, values):
        values["x"] = values["x"] + super().forward(values["x"])
        values["means"].append(values["x"].mean())
        values.pop("first", None)
        return values["x"].sum()


class Graph:
    """An object with tensors of which torch knows nothing."""

    def __init__(self, x, edges):
        self.x, self.edges, self.count = x, edges, 0


class OfGraphs(Block):
    """Changes attributes of what it is given, and returns it."""

    def forward(self, graph):
        graph.x = super().forward(graph.x) + graph.edges[0]
        graph.count += 1
        return graph


class OfOutputs(Block):
    """Takes a dataclass and returns a new one."""

    def forward(self, output):
        return Output(super().forward(output.x), output.aux + output.x.mean())


class Distributions(Block):
    """Returns an object of torch with tensors."""

    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), 0.5 + x.square(), validate_args=False)


class Tells(Block):
    """Returns numbers made of values and of arguments, and a text that it was given."""

    def forward(self, x, scale, name):
        y = super().forward(x) * scale
        return y, y.abs().mean().item(), (y.sum(1) > 0).tolist(), y.argmax(1).tolist(), 2 * scale, name, "text"


class Couples(Block):
    """Adds to what it is given, in place."""

    def forward(self, x, total):
        y = super().forward(x)
        total += y.sum(1)
        return y, total


class Regularised(Block):
    """Leaves a loss of its own in an attribute, and in one of its part what it returns."""

    def forward(self, x):
        y = super().forward(x)
        self.loss = y.square().mean()
        self.linear.latest = y
        return y


OF_ALL_LAYERS = []


class Tracker:
    def __init__(self):
        self.losses = []
        self.total = None


class Collecting(Block):
    """Leaves losses of its own in containers, of its own and of all layers, and what nobody reads."""

    tracker = Tracker()

    def __init__(self):
        super().__init__()
        self.losses, self.by_name, self.latest, self.unread = [], {}, [], []

    def forward(self, x):
        y = super().forward(x)
        self.losses.append(y.square().mean())
        self.by_name.setdefault("losses", {}).setdefault("sums", []).append((y.sum(), "sum"))
        self.latest.clear()
        self.latest.append(y)
        self.pair = [y.amax(), y.detach()]
        self.unread.append(y.detach())
        self.tracker.losses.append(y.abs().mean())
        self.tracker.total = y.std() if self.tracker.total is None else self.tracker.total + y.std()
        OF_ALL_LAYERS.append({"amin": y.amin()})
        return y


class TwoParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(self.a(x).relu())


class Net(nn.Module):
    """Runs a function as its `forward`."""

    def __init__(self, function, layer=Block, num_layers=6, **others):
        super().__init__()
        self.function = function
        self.embed = nn.Embedding(11, WIDTH, padding_idx=0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 3)
        self.prepares = Prepares()
        self.scale = nn.Parameter(torch.rand(num_layers))
        for name, make in others.items():
            self.add_module(name, make())

    def forward(self, x, y):
        return self.function(self, x, y)

    def loss(self, x, y):
        return nn.functional.cross_entropy(self.head(x), y)


@dataclass
class Case:
    """Attributes:
    function: The `forward`.
    refused: What stages that cannot be run say; None: all are equal.
    options: Of `Net`.
    """

    function: object
    refused: str | None
    options: dict

    def make(self):
        """The module, and its step."""
        torch.manual_seed(3)
        net = Net(self.function, **self.options)
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(8, WIDTH, generator=generator)
        y = torch.randint(0, 3, (8,), generator=generator)
        return net, lambda owner: owner(x.clone(), y.clone())


def case(refused=None, **options):
    def register(function):
        CASES[function.__name__] = Case(function, refused, options)
        return function

    return register


@case()
def chain(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y)


@case()
def residual_loop(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = x + layer(x)
    return net.loss(x, y)


@case()
def parameters_between_layers(net, x, y):
    x = net.stem(x)
    for factor, layer in zip(net.scale, net.layers, strict=True):
        x = x + factor * layer(x)
    return net.loss(x, y)


@case()
def long_skips(net, x, y):
    down, x = [], net.stem(x)
    for layer in net.layers[:3]:
        x = layer(x)
        down.append(x)
    for layer in net.layers[3:]:
        x = layer(x + down.pop())
    return net.loss(x, y)


@case()
def hidden_states_used_at_the_end(net, x, y):
    states = [net.stem(x)]
    for layer in net.layers:
        states.append(layer(states[-1]))
    return net.loss(torch.stack(states).mean(0), y)


@case()
def boolean_mask_crosses(net, x, y):
    x = net.stem(x)
    keep = x > 0
    for layer in net.layers:
        x = torch.where(keep, layer(x), x)
    return net.loss(x, y)


@case()
def padding_mask_from_embeddings(net, x, y):
    embedded = net.embed((x * 3).long().clamp(0, 10))
    padding = embedded.abs().sum(-1) == 0
    x = embedded.mean(1)
    for layer in net.layers:
        x = layer(x)
    weights = padding.float().mean(1, keepdim=True)
    return net.loss(x * (1 - weights), y)


@case()
def early_argmax_used_later(net, x, y):
    x = net.stem(x)
    chosen = x.argmax(-1)
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y) + x.gather(1, chosen[:, None]).mean()


@case()
def integer_index_of_a_stage(net, x, y):
    x = net.stem(x)
    order = x.sum(-1).argsort()
    for layer in net.layers:
        x = layer(x)
    return net.loss(x[order], y)


@case(layer=InPlace)
def layers_change_their_argument(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y)


@case(layer=InPlace)
def a_skip_around_a_layer_that_changes_its_argument(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        before = x
        x = layer(x * 1.0) + before
    return net.loss(x, y)


@case()
def changed_in_place_between_layers(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x) * 1.0
        x += 1.0
        x.mul_(0.9)
    return net.loss(x, y)


@case(refused=f"{SHARES}|{LEAF}")
def views_of_what_is_changed_later(net, x, y):
    x = net.stem(x) * 1.0
    half = x[:, :3]
    for layer in net.layers:
        x = layer(x + 0.0) * 1.0
    half.zero_()
    return net.loss(x, y) + half.sum()


@case(refused=f"{SHARES}|{LEAF}")
def a_view_changes_its_base(net, x, y):
    x = net.stem(x) * 1.0
    half = x[:, :3]
    z = x + 0.0
    for layer in net.layers:
        z = layer(z)
    half.mul_(2.0)
    return net.loss(z + x, y)


@case(refused=SHARES)
def a_base_changes_its_view(net, x, y):
    x = net.stem(x) * 1.0
    half = x[:, 1:4]
    z = x + 0.0
    for layer in net.layers:
        z = layer(z)
    x.add_(1.0)
    return net.loss(z, y) + half.exp().sum() + x.sum()


@case(refused=SHARES)
def a_view_is_changed_before_and_the_base_used_after(net, x, y):
    x = net.stem(x) * 1.0
    x[:, 0].mul_(3.0)
    x[:, 1] = x[:, 2]
    z = x + 0.0
    for layer in net.layers:
        z = layer(z)
    return net.loss(z + x, y)


@case()
def written_into_a_buffer(net, x, y):
    buf = torch.zeros(8, len(net.layers), WIDTH)
    x = net.stem(x)
    for index, layer in enumerate(net.layers):
        x = layer(x)
        buf[:, index] = x
    return net.loss(buf.mean(1) + x, y)


@case(refused=SHARES)
def written_into_a_buffer_with_copy(net, x, y):
    buf = torch.zeros(len(net.layers), 8, WIDTH)
    x = net.stem(x)
    for index, layer in enumerate(net.layers):
        x = layer(x)
        buf[index].copy_(x)
    return net.loss(buf.mean(0), y)


@case()
def added_to_an_untracked_sum(net, x, y):
    total = torch.zeros(8, WIDTH)
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
        total += x
    return net.loss(total, y)


@case()
def written_with_out(net, x, y):
    x = net.stem(x)
    seen = torch.zeros(8, WIDTH)
    for layer in net.layers:
        torch.mul(x.detach(), 2.0, out=seen)
        x = layer(x) + seen
    return net.loss(x, y)


@case()
def layers_called_repeatedly(net, x, y):
    x = net.stem(x)
    for _ in range(2):
        for layer in net.layers:
            x = x + layer(x)
    return net.loss(x, y)


@case()
def one_layer_many_times(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = net.layers[0](layer(x))
    return net.loss(x, y)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor * 1.5, None


@case()
def functions_of_the_user(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = Doubles.apply(layer(x), 2.0)
    return net.loss(x, y)


@case()
def checkpointed_layers(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return net.loss(x, y)


@case()
def checkpointed_groups(net, x, y):
    def group(x, layers):
        for layer in layers:
            x = layer(x)
        return x

    x = net.stem(x)
    for start in range(0, 6, 2):
        x = checkpoint(group, x, net.layers[start : start + 2], use_reentrant=False)
    return net.loss(x, y)


@case()
def checkpointed_with_reentrance(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return net.loss(x, y)


@case()
def numbers_drawn_midway(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x + 0.1 * torch.randn(8, WIDTH))
        x = x * torch.rand(8, 1)
    return net.loss(x, y)


@case()
def layers_dropped_at_random(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        drawn = float(torch.rand(()))
        x = layer(x) if drawn < 0.7 else x * drawn
    return net.loss(x, y)


@case()
def a_number_read_midway(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x) / (1 + abs(x.sum().item()))
    return net.loss(x, y)


@case(refused=f"{OTHERWISE}.*last looked at some at .*if x.sum.*It does something else at .*cases.py|{NOT_SENT}")
def control_flow_of_values(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
        if x.sum() > 0:
            x = x * 2.0
    return net.loss(x, y)


@case(refused=f"{OTHERWISE}.*cases.py|{NOT_SENT}")
def number_of_layers_by_values(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        if x.abs().mean() > 0.3:
            break
        x = layer(x)
    return net.loss(x, y)


@case()
def selected_by_the_batch(net, x, y):
    mask = x[:, 0] > 0
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    return net.loss(x[mask], y[mask]) + x[y != 1].mean()


@case()
def selected_midway_by_the_batch(net, x, y):
    mask = y != 1
    x = net.stem(x)[mask]
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y[mask])


@case()
def selected_by_a_stage(net, x, y):
    x = net.stem(x)
    mask = x[:, 0] > 0
    x, y = x[mask], y[mask]
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y)


@case()
def nonzero_of_a_stage(net, x, y):
    x = net.stem(x)
    rows = (x[:, 0] > 0).nonzero()
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y) + x[rows[:, 0]].sum()


@case()
def chosen_rows_per_layer(net, x, y):
    """Between two layers nothing is of varying size."""
    x = net.stem(x)
    chosen = x[:, : len(net.layers)].argmax(-1)
    for index, layer in enumerate(net.layers):
        rows, _ = torch.where((chosen == index)[:, None])
        part = layer(x[rows]).reshape(-1, x.shape[1]) * net.scale[index]
        x = x.index_add(0, rows, part / part.shape[1] ** 0.5)
    return net.loss(x, y)


@case()
def number_of_chosen_rows(net, x, y):
    """Python's numbers are of the stage that has the tensor, also where only its size is wanted later."""
    x = net.stem(x)
    number = x[x[:, 0] > 0].shape[0]
    for layer in net.layers:
        x = layer(x)
    return net.loss(x / (1 + 2 * number), y)


@case()
def number_of_chosen_rows_in_a_tensor_of_the_step(net, x, y):
    x = net.stem(x)
    weight = torch.ones(1, 6) / max((x[:, 0] > 0).nonzero().size(0), 1)
    for layer in net.layers:
        x = layer(x)
    return net.loss(x * weight, y)


@case(layer=Pair)
def tuples(net, x, y):
    value = (net.stem(x), (x[:, :1] > 0).long())
    for layer in net.layers:
        value = layer(value)
    return net.loss(value[0], y)


@case(layer=Mapping)
def dicts(net, x, y):
    value = {"x": net.stem(x), "sum": 0.0}
    for layer in net.layers:
        value = layer(value)
    return {"loss": net.loss(value["sum"], y), "name": value["name"], "logits": value["x"]}


@case(layer=WithAux)
def auxiliary_losses(net, x, y):
    x, aux = net.stem(x), 0.0
    for layer in net.layers:
        x, each = layer(x)
        aux = aux + each
    return net.loss(x, y) + 0.1 * aux


@case()
def dataclasses_between_layers(net, x, y):
    value = Output(net.stem(x), x)
    for layer in net.layers:
        value = Output(layer(value.x), value.x + value.aux)
    return net.loss(value.x + value.aux, y)


@case(layer=OfOutputs)
def layers_of_dataclasses(net, x, y):
    output = Output(net.stem(x), x.mean())
    for layer in net.layers:
        output = layer(output)
    return net.loss(output.x, y) + output.aux


@case(layer=OfGraphs)
def layers_of_objects(net, x, y):
    graph = same = Graph(net.stem(x), [x])
    for layer in net.layers:
        graph = layer(graph)
    return net.loss(same.x, y) * graph.count


@case(layer=Writes)
def layers_that_write_into_a_dict(net, x, y):
    values = {"x": net.stem(x), "means": [], "first": True}
    sums = [layer(values) for layer in net.layers]
    return net.loss(values["x"], y) + sum(values["means"]) + 0.1 * sum(sums) + len(values)


@case(layer=Distributions)
def distributions_between_layers(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        normal = layer(x)
        x = normal.mean + 0.1 * normal.log_prob(x)
    return net.loss(x, y)


@case()
def detached_parts(net, x, y):
    x = net.stem(x)
    target = x.detach()
    for layer in net.layers:
        x = layer(x) + 0.5 * x.detach()
    return net.loss(x, y) + (x - target).square().mean()


@case()
def parts_without_gradients(net, x, y):
    x = net.stem(x)
    with torch.no_grad():
        teacher = x
        for layer in net.layers[:3]:
            teacher = layer(teacher)
    for layer in net.layers[3:]:
        x = layer(x)
    return net.loss(x, y) + (x - teacher).square().mean()


@case()
def frozen_layers(net, x, y):
    net.layers[:3].requires_grad_(False)
    net.stem.requires_grad_(False)
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y)


@case()
def used_by_the_last_stage_only(net, x, y):
    first = net.stem(x)
    x = first
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y) + (first * net.scale.sum()).mean()


@case()
def mixed_precision(net, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = net.stem(x)
        for layer in net.layers:
            x = x + layer(x)
        return net.loss(x.float(), y)


@case(layer=TwoParts)
def hooks_on_parts(net, x, y):
    seen = []
    handles = [layer.a.register_forward_hook(lambda module, args, output: seen.append(output)) for layer in net.layers]
    try:
        x = net.stem(x)
        for layer in net.layers:
            x = layer(x)
    finally:
        for handle in handles:
            handle.remove()
    return net.loss(x, y) + 0.1 * sum(state.square().mean() for state in seen)


@case()
def gradient_hooks(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
        x.register_hook(lambda gradient: gradient * 1.5)
    return net.loss(x, y)


@case()
def numbers_that_are_no_tensors(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x.view(x.shape[0], -1)) * len(x) / x.numel() + torch.zeros_like(x) + x.new_ones(WIDTH)
    return net.loss(x, y)


@case()
def einsum_lists_and_splits(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        a, b = x.chunk(2, dim=-1)
        x = layer(torch.cat([b, a], dim=-1)) + torch.einsum("bi,bj->bi", x, x)
    return net.loss(sum(torch.unbind(torch.stack([x, x * 2]))), y)


@case()
def top_k_and_several_results(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        values, indices = x.topk(3, dim=-1)
        x = layer(x).scatter_add(1, indices, values)
    return net.loss(x, y)


@case()
def results_of_a_buffer_of_the_module(net, x, y):
    state = x.new_zeros(8, WIDTH)
    x = net.stem(x)
    for layer in net.layers:
        state = state.detach()
        state.add_(x.detach())
        x = layer(x) + 0.1 * state
    return net.loss(x, y)


@case()
def weights_through_views(net, x, y):
    x = net.stem(x)
    for index, layer in enumerate(net.layers):
        x = layer(x) * net.scale[index]
    return net.loss(x @ net.stem.weight.T + net.stem.weight.detach()[0], y)


@case()
def values_kept_on_the_module(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        net.kept = x
        x = layer(x) + net.kept
    loss = net.loss(x, y)
    del net.kept
    return loss


@case(layer=Tells)
def numbers_and_texts_of_layers(net, x, y):
    x, scale, total, name = net.stem(x), 0.5, 0.0, f"batch of {len(x)}"
    for layer in net.layers:
        x, mean, positive, largest, scale, name, text = layer(x, scale, name)
        total = total + mean * sum(positive) + scale
        x = x + torch.tensor(largest)[:, None] * 0.1
    return {"loss": net.loss(x, y) * total, "name": name, "text": text, "mean": mean, "scale": scale}


@case(layer=Regularised)
def losses_that_layers_keep(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    loss = net.loss(x, y) + sum(layer.loss for layer in net.layers) + net.layers[2].linear.latest.mean()
    for layer in net.layers:
        layer.loss = layer.linear.latest = None  # they could not be copied
    return loss


@case(layer=Collecting)
def losses_that_layers_collect(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    tracker = Collecting.tracker
    loss = net.loss(x, y) + sum(tracker.losses) + 2 * tracker.total + sum(each["amin"] for each in OF_ALL_LAYERS)
    for layer in net.layers:
        ((of_sum, _),) = layer.by_name["losses"]["sums"]
        loss = loss + sum(layer.losses) + 0.1 * of_sum + layer.latest[-1].mean() + layer.pair[0]
        layer.losses.clear()
        layer.by_name.clear()
        layer.pair = layer.latest = []
    tracker.losses, tracker.total = [], None
    OF_ALL_LAYERS.clear()
    return loss


@case(refused=SHARES)
def written_into_rows_of_a_buffer(net, x, y):
    buf = torch.zeros(len(net.layers), 8, WIDTH)
    rows = buf.unbind(0)
    x = net.stem(x)
    for row, layer in zip(rows, net.layers, strict=True):
        x = layer(x)
        row.add_(x.detach())
    return net.loss(buf.mean(0) + x, y)


@case(refused=SHARES)
def a_view_from_before_a_buffer_is_written(net, x, y):
    buf = torch.zeros(8, WIDTH)
    transposed = buf.t()
    x = net.stem(x)
    buf += x.detach()
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y) + (transposed.t() * x).sum()


@case()
def written_into_the_batch(net, x, y):
    given = x
    x = net.stem(x * 1.0)
    for layer in net.layers:
        x = layer(x)
        given.copy_(x.detach())
    return net.loss(x + given, y)


@case()
def model_called_twice(net, x, y):
    def forward(x):
        x = net.stem(x)
        for layer in net.layers:
            x = x + layer(x)
        return net.head(x)

    return nn.functional.cross_entropy(forward(x), y) + forward(x * 2).square().mean()


@case()
def weights_of_a_layer_used_elsewhere(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    penalty = sum(layer.linear.weight.square().sum() for layer in net.layers)
    return net.loss(x, y) + 0.1 * penalty + x.mm(net.layers[0].linear.weight).mean()


@case()
def through_numpy(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x) + torch.from_numpy(x.detach().numpy().copy()).mean()
    return net.loss(x, y)


GRADIENT = r"torch\.autograd\.grad in a step can only .*cases\.py"


@case(layer=Couples)
def layers_add_to_what_had_no_gradients(net, x, y):
    total = net.prepares(x, y)[0].sum(1)
    z = net.stem(x)
    halved = total / 2
    for layer in net.layers:
        z, total = layer(z, total)
    return net.loss(z, y) + (total - halved).square().mean()


@case(refused=GRADIENT)
def gradients_inside_the_step(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    (gradient,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
    return net.loss(x, y) + gradient.square().mean()


@case(refused=SHARES)
def a_third_view_is_changed(net, x, y):
    x = net.stem(x).detach() * 1.0
    half, z = x[:, :3], x + 0.0
    for layer in net.layers:
        z = layer(z)
    x[:, 1].zero_()
    return net.loss(z, y) + (half * z[:, :3]).sum() + (x * z).mean()


@case(refused=SHARES)
def a_view_of_a_written_buffer(net, x, y):
    buf = torch.zeros(8, WIDTH)
    x = net.stem(x)
    buf += x.detach()
    transposed = buf.t()
    for layer in net.layers:
        x = layer(x)
        buf.mul_(0.5)
    return net.loss(x, y) + (transposed.t() * x).sum() + buf.sum()


@torch.jit.script
def gate(x: torch.Tensor, y: torch.Tensor):
    return x * torch.sigmoid(y) + y


@case()
def scripted_functions(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = gate(x, layer(x))
    return net.loss(x, y)


@case()
def masks_made_by_vmap(net, x, y):
    x = net.stem(x)
    mask = torch.vmap(lambda row, scale: (row + 1) * scale)(torch.arange(6), net.scale)
    for layer in net.layers:
        x = layer(x) * mask
    return net.loss(x, y)


@case()
def changed_by_a_function_of_the_user(net, x, y):
    @torch.no_grad()
    def average(old, new):
        old.lerp_(new, 0.5)

    x = net.stem(x)
    kept = x.detach().clone()
    for layer in net.layers:
        x = layer(x)
        average(kept, x)
    return net.loss(x + kept, y)


@case()
def data_is_replaced(net, x, y):
    x = net.stem(x)
    other = x.detach() + 0.0
    for layer in net.layers:
        x = layer(x)
        other.data = other.data * 0.5 + x.detach()
    return net.loss(x + other, y)


@case()
def form_of_an_early_value(net, x, y):
    x = first = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    return net.loss(x + torch.ones_like(first), y)


@case()
def form_of_an_early_value_in_the_middle(net, x, y):
    x = first = net.stem(x)
    for layer in net.layers[:3]:
        x = layer(x)
    x = x + torch.ones_like(first)
    for layer in net.layers[3:]:
        x = layer(x)
    return net.loss(x, y)


@case(refused=SHARES)
def values_that_share_memory_are_changed_by_another_view(net, x, y):
    x = net.stem(x)
    state = x.detach() * 1.0
    rows, columns = state[:4], state[:, :3]
    for layer in net.layers:
        x = layer(x)
    state[0].zero_()
    return net.loss(x, y) + (columns * x[:, :3]).sum() + (rows * x[:4]).sum()


# ---- sizes that depend on values ----


class Drops(nn.Module):
    """Goes on with the rows that it likes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, rows):
        x = self.linear(x).tanh()
        keep = x[:, 0] > -0.3
        return x[keep], rows[keep]


@case(layer=Drops)
def layers_that_drop_rows(net, x, y):
    x, rows = net.stem(x), torch.arange(len(x))
    for layer in net.layers:
        x, rows = layer(x, rows)
    return net.loss(x, y[rows])


@case(layer=Drops)
def dropped_rows_are_put_back(net, x, y):
    x = net.stem(x)
    rows = torch.arange(len(x))
    whole = x.clone()
    for layer in net.layers:
        x, rows = layer(x, rows)
        whole = whole.index_add(0, rows, x)
    out = torch.zeros_like(whole)
    keep = whole[:, 1] > 0
    out[keep] = whole[keep] * 2
    return net.loss(out + whole, y)


@case()
def all_rows_are_dropped(net, x, y):
    x = net.stem(x)
    few = x[x[:, 0] > 1000]
    for layer in net.layers:
        x, few = layer(x), layer(few)
    return net.loss(x, y) + few.sum() + few.new_zeros(1).sum()


@case()
def unique_codes(net, x, y):
    x = net.stem(x)
    codes, back = torch.unique(x.argmax(-1), return_inverse=True)
    table = net.embed(codes)
    for layer in net.layers:
        table = layer(table)
    return net.loss(x + table[back], y)


@case()
def as_many_as_lie_above_a_threshold(net, x, y):
    """A number that Python reads is a size afterwards."""
    x = net.stem(x)
    number = int((x[:, 0] > 0).sum())
    best = x[:, 1].topk(max(number, 1)).indices
    part = x[best]
    for layer in net.layers:
        part = layer(part)
    return net.loss(x.index_add(0, best, part), y)


@case()
def as_many_as_an_item_says(net, x, y):
    x = net.stem(x)
    number = 1 + (x[:, 0] > 0).sum().item()
    part = x[:number]
    for layer in net.layers:
        part = layer(part)
    return net.loss(part, y[:number]) + part.shape[0] / 10


@case()
def slices_by_a_size(net, x, y):
    x = net.stem(x)
    kept = x[x[:, 0] > 0]
    part = x[: kept.shape[0]] + kept
    for layer in net.layers:
        part = layer(part)
    return net.loss(part, y[: kept.shape[0]]) + net.loss(x, y)


@case()
def zeros_like_what_was_selected(net, x, y):
    x = net.stem(x)
    kept = x[x[:, 0] > 0]
    memory = torch.zeros_like(kept)
    for layer in net.layers:
        kept = layer(kept)
        memory = memory + kept
    return net.loss(x, y) + memory.mean() + kept.new_ones(kept.shape[0], 1).sum()


@case()
def rows_of_their_own_number(net, x, y):
    """A tensor of the step has a size of a stage."""
    x = net.stem(x)
    kept = x[x[:, 0] > 0]
    kept = kept + net.embed(torch.arange(kept.shape[0]))
    for layer in net.layers:
        kept = layer(kept)
    return net.loss(x, y) + kept.square().sum()


@case()
def parts_of_their_own_lengths(net, x, y):
    """Lengths that Python reads."""
    x = net.stem(x)
    lengths = 1 + (x[:3] > 0).sum(-1)
    rows = torch.repeat_interleave(x[:3], lengths, dim=0)
    for layer in net.layers:
        rows = layer(rows)
    parts = rows.split(lengths.tolist())
    pooled = torch.stack([part.mean(0) for part in parts])
    return net.loss(pooled, y[:3])


@case()
def packed_sequences(net, x, y):
    x = net.stem(x)
    lengths = 1 + (x[:4] > 0).sum(-1).cpu()
    steps = x[:4, None].expand(-1, 8, -1)
    packed = nn.utils.rnn.pack_padded_sequence(steps, lengths, batch_first=True, enforce_sorted=False)
    data = packed.data
    for layer in net.layers:
        data = layer(data)
    packed = packed._replace(data=data)
    padded, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    return net.loss(padded.sum(1), y[:4])


@case()
def experts_dispatch_once(net, x, y):
    """Rows stay sorted by their experts over all layers."""
    x = net.stem(x)
    chosen = x[:, :3].argmax(-1)
    rows = [(chosen == e).nonzero()[:, 0] for e in range(3)]
    parts = [x[r] for r in rows]
    for layer in net.layers:
        parts = [layer(part) * scale for part, scale in zip(parts, net.scale[:3], strict=True)]
    out = torch.zeros_like(x)
    for r, part in zip(rows, parts, strict=True):
        out = out.index_add(0, r, part)
    return net.loss(out, y)


@case()
def masked_select_and_scatter(net, x, y):
    x = net.stem(x)
    mask = x > 0
    values = x.masked_select(mask)
    for layer in net.layers:
        x = layer(x)
        values = values * 0.9 + x.mean()
    return net.loss(x.masked_scatter(mask, values), y)


@case()
def dimensions_that_come_and_go(net, x, y):
    x = net.stem(x)
    some = x[x[:, 0] > x[:, 0].max() - 1e-6].squeeze(0)
    for layer in net.layers:
        x, some = layer(x), layer(some)
    return net.loss(x + some, y)


@case()
def largest_of_what_was_selected(net, x, y):
    """Of nothing there is no largest."""
    x = net.stem(x)
    largest = x[x[:, 0] > x[:, 0].mean()].amax(0)
    for layer in net.layers:
        x = layer(x) + largest
        largest = x[x[:, 1] >= x[:, 1].mean()].amax(0)
    return net.loss(x + largest, y)


@case()
def nested_lists_of_selected(net, x, y):
    x = net.stem(x)
    sequences = [x[:, : 1 + i][x[:, i] > 0].flatten() for i in range(3)]
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y) + padded.square().sum()


class Prepares(nn.Module):
    """A module without tensors that prepares the batch, of which the step looks at values then."""

    def forward(self, x, y):
        return x * 2, y.clamp(min=0)


@case()
def looks_at_a_prepared_batch(net, x, y):
    x, y = net.prepares(x, y + 1)
    assert (y > 0).all(), "zeros are no classes"
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y - 1)


class SizesInBuffers(nn.Module):
    """As EnCodec keeps paddings, and DLRM which pairs count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("padding", torch.tensor(2), persistent=False)
        self.register_buffer("parts", torch.tensor([2, 4]))
        self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))
        self.linear = nn.Linear(4, WIDTH)

    def forward(self, x):
        short, long = x[:, :WIDTH].split(self.parts.tolist(), dim=-1)
        x = self.linear(torch.cat([long, short], -1)[:, self.mask]).tanh()
        return nn.functional.pad(x, (0, int(self.padding)))


@case(layer=SizesInBuffers)
def sizes_in_buffers(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    return net.loss(x[:, :WIDTH], y)


@case()
def layer_by_layer(net, x, y):
    """Each layer has a loss of its own, and gradients that end where it begins."""
    x, loss = net.stem(x), 0
    for layer in net.layers:
        x = x.detach().requires_grad_()
        x = layer(x)
        loss = loss + x.square().mean()
    return net.loss(x, y) + loss


@case()
def begins_anew_after_frozen_layers(net, x, y):
    with torch.no_grad():
        x = net.stem(x)
        for layer in net.layers[:3]:
            x = layer(x)
    x = x.detach()
    x.requires_grad = True
    for layer in net.layers[3:]:
        x = layer(x)
    return net.loss(x, y)


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, max_norm=0.5)

    def forward(self, indices):
        return self.table(indices)


@case(refused="'renormed' writes into its weights when it is called", renormed=Renormed)
def looks_up_what_is_renormed_twice(net, x, y):
    x = net.stem(x) + net.renormed(y)
    for layer in net.layers[:4]:
        x = layer(x)
    return net.loss(x + net.renormed(y + 1), y)


class Sparse(nn.Module):
    def forward(self, x):
        return (x.detach() > 0).float().to_sparse()


@case(refused=r"got one of layout torch.sparse_coo. Let the layer return a dense one", sparse=Sparse)
def sparse_values_that_a_layer_returns(net, x, y):
    x = net.stem(x)
    mask = net.sparse(x)
    for layer in net.layers:
        x = layer(x)
    return net.loss(x * mask.to_dense(), y)


@case()
def operations_that_zeros_are_refused_by(net, x, y):
    """A matrix of zeros has no inverse, and nothing is drawn where nothing is likely."""
    x = net.stem(x)
    for layer in net.layers:
        scale = x.square().mean() * torch.eye(WIDTH)
        x = layer(x) + x.mm(scale.inverse()) * scale[0, 0] + torch.linalg.cholesky(scale)[0]
        largest = nn.functional.one_hot(x.argmax(-1), WIDTH) * x.detach().abs()
        x = x + torch.multinomial(largest, 1)
    return net.loss(x, y)


@case()
def weights_of_a_layer_are_inverted(net, x, y):
    x = net.stem(x)
    for layer in net.layers:
        x = layer(x)
    for layer in reversed(net.layers):
        weight = layer.linear.weight
        x = x + 0.1 * weight.inverse().tanh().sum(0) + 0.1 * torch.linalg.solve(weight, x, left=False).tanh()
    return net.loss(x, y)

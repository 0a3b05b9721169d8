"""What steps do beside calling layers: ask parameters where they lie, switch modules, compile and map functions."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from functools import partial
from queue import Queue
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from tests.strategy.zoo.case import NUM_CLASSES, Classifier, Module, case, tokens, vectors
from tests.strategy.zoo.own import VOCABULARY, WIDTH, InALoop, block


class Layered(Module):
    """Layers in a loop, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = InALoop()
        self.head = nn.Linear(WIDTH, WIDTH)


class AsksParameters(Layered):
    """Makes tensors where parameters lie, and in their form."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        first, last = next(self.model.parameters()), self.head.weight
        noise = torch.linspace(0, 1, WIDTH, device=first.device) + torch.zeros(1, device=last.device)
        assert not any(p.is_meta or p.device.type == "meta" or p[:1].device.type == "meta" for p in self.parameters())
        x = self.model(x.to(first.device) * (1 + 0.1 * noise.type_as(first)))
        ramp = torch.arange(WIDTH, device=self.model.layers[0][0].weight.device).to(last)
        return functional.mse_loss(self.head(x) + first.new_zeros(1) + torch.ones_like(last)[0] * 0.01 * ramp, y)


@case("steps")
def asks_parameters() -> Any:
    return AsksParameters(), vectors()


class GivesBackWeights(Layered):
    """Penalties on weights by operations that give a parameter back as it is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.mse_loss(self.head(self.model(x)), y)
        for parameter in self.parameters():
            for same in (parameter.float(), parameter.contiguous(), parameter.to("cpu"), parameter.type_as(parameter)):
                loss = loss + 0.01 * same.abs().mean()
            loss = loss + 0.01 * parameter.flatten().square().sum()  # a bias is flat
        return loss + 0.01 * torch.cat([p.flatten() for p in self.head.parameters()]).norm()


@case("steps")
def gives_back_weights() -> Any:
    return GivesBackWeights(), vectors()


class Probe(nn.Module):
    """Reads what others have made without training them, and with `torch.autograd.grad` by what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out: Tensor = self.layers(x)
        return out + torch.autograd.grad(out.sum(), x, create_graph=True)[0]


class Probed(Layered):
    """Layers before a probe have no gradients, which weight decay would tell."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = Probe()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return functional.mse_loss(self.probe(self.head(self.model(x))), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


@case("steps")
def probed() -> Any:
    return Probed(), vectors()


class Scale(nn.Module):
    """Does something else in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 if self.training else 0.5)


class Switches(Layered):
    """Freezes the model, or lets it be in evaluation mode, for a part of the step; and for good after a while."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.weights = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.mse_loss(self.scale(self.model(x)), y)
        self.model.requires_grad_(False)
        self.scale.eval()
        through = self.scale(self.model(x * self.weights))
        self.model.requires_grad_(True)
        self.scale.train()
        if batch_idx == 1:
            self.head.requires_grad_(False)
        return loss + functional.mse_loss(self.scale(self.head(through)), y)


@case("steps")
def switches() -> Any:
    return Switches(), vectors()


@torch.compile(backend="eager")
def gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate) + 1


class CallsFunctions(Layered):
    """Compiled functions around layers and between them, and functions that are mapped and differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.compile(lambda x: self.model.layers[1](self.model.layers[0](x)), backend="eager")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.first(x)
        x = gated(x, x.detach())
        scale = x.mean()
        for layer in self.model.layers[2:]:
            x = layer(torch.vmap(lambda row: row / (1 + row.norm()) + scale)(x))
            x = x + 0.1 * torch.func.grad(lambda each: each.pow(3).sum())(x)
        return torch.vmap(functional.mse_loss)(gated(self.head(x), x), y).mean()


@case("steps")
def calls_functions() -> Any:
    return CallsFunctions(), vectors()


class Hypernetwork(Module):
    """The first layers compute the weights of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.made_by = nn.Sequential(block(), nn.Linear(WIDTH, WIDTH * WIDTH))
        self.model = InALoop()
        self.target = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        weight = self.made_by(torch.ones_like(x[0])).view(WIDTH, WIDTH) / WIDTH
        return functional.mse_loss(torch.func.functional_call(self.target, {"weight": weight}, (self.model(x),)), y)


@case("steps")
def hypernetwork() -> Any:
    return Hypernetwork(), vectors()


class MetaLearning(Module):
    """MAML: an inner step for each sample, by whose weights the outer loss is differentiated too."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(block() for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = []
        for x, y in zip(*batch, strict=True):
            weights = dict(self.model.named_parameters())
            for _ in range(2):
                loss = functional.mse_loss(torch.func.functional_call(self.model, weights, (x[None],)), y[None])
                found = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True)
                weights = {name: w - 0.05 * by for (name, w), by in zip(weights.items(), found, strict=True)}
            losses.append(functional.mse_loss(torch.func.functional_call(self.model, weights, (x[None],)), y[None]))
        return torch.stack(losses).mean()


@case("steps")
def meta_learning() -> Any:
    return MetaLearning(), vectors()


class Halved(nn.Module):
    """A layer that halves the gradients of its input by a hook on its backward, and passes a mask on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = block()
        self.register_full_backward_hook(
            lambda _, gradients, __: tuple(None if g is None else g / 2 for g in gradients)
        )
        self.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 1.5, *gradients[1:]))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.inner(x) * mask, mask


class HooksOnBackward(Module):
    """Hooks on the backward of layers that change gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Halved() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mask = (x > 0).float()
        for layer in self.layers:
            x, mask = layer(x, mask)
        return functional.mse_loss(x * mask, y)


@case("steps")
def hooks_on_backward() -> Any:
    return HooksOnBackward(), vectors()


class GoesOtherWays(Layered):
    """Makes tensors from texts, as long as the longest, and calls layers by the number of the batch and a text."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        longest = max(map(len, batch["texts"]))
        codes = torch.tensor([[ord(letter) / 128 for letter in text.ljust(longest)] for text in batch["texts"]])
        mask = torch.tensor([[position < len(text) for position in range(longest)] for text in batch["texts"]]).float()
        x = codes[..., None] * batch["x"][:, None]
        layers = self.model.layers
        x = layers[0](x) if batch_idx % 2 else layers[1](layers[0](x))
        x = layers[3](layers[2](x) + x) if batch["texts"][0][0] == "a" else layers[2](x)
        for layer in layers[4:]:
            x = x + layer(x)
        pooled = (self.head(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return functional.mse_loss(pooled, batch["y"])


@case("steps")
def goes_other_ways() -> Any:
    make = vectors()

    def with_texts(generator: torch.Generator) -> Any:
        x, y = make(generator)
        lengths = torch.randint(1, 9, (len(x),), generator=generator).tolist()
        return {"x": x, "y": y, "texts": ["ab"[length % 2] * length for length in lengths]}

    return GoesOtherWays(), with_texts


class TakesFromItsBatch(Layered):
    """Takes labels out of the batch and writes into what is left, as each run of the step does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y, x = batch.pop("y"), batch["x"]
        x.mul_(2).sub_(0.1)
        y[y < 0] += 1
        batch["x"] = self.model(x)
        return functional.mse_loss(self.head(batch["x"]), y)


@case("steps")
def takes_from_its_batch() -> Any:
    make = vectors()
    return TakesFromItsBatch(), lambda generator: dict(zip("xy", make(generator), strict=True))


def neighbours() -> Tensor:
    matrix = torch.eye(WIDTH)
    matrix[0, 1] = matrix[3, 2] = 0.5
    return matrix.to_sparse()


class Convolves(nn.Module):
    """A layer with a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("matrix", neighbours())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sparse.mm(self.matrix, self.linear(x).tanh().T).T


class SparseBuffers(Module):
    """Sparse buffers of layers, and one that the step uses between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolves() for _ in range(4))
        self.register_buffer("matrix", neighbours())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(torch.sparse.mm(self.matrix, x.T).T)
        return functional.mse_loss(x, y)


@case("steps")
def sparse_buffers() -> Any:
    return SparseBuffers(), vectors()


class Coupling(nn.Module):
    """A part of a flow, which is only run backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def inverse(self, z: Tensor) -> tuple[Tensor, Tensor]:
        a, b = z.chunk(2, 1)
        shift, log_scale = self.net(a).chunk(2, 1)
        return torch.cat([(b - shift) * torch.exp(-log_scale.tanh()), a], 1), -log_scale.tanh().sum(1)


class Flow(Module):
    """As in normflows: no layer is called itself, and the batch goes right into the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList(Coupling() for _ in range(6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z, log_det = batch[0], torch.zeros(len(batch[0]))
        for flow in reversed(self.flows):
            z, change = flow.inverse(z)
            log_det = log_det + change
        return (0.5 * z.square().sum(1) - log_det).mean()


@case("own")
def flow_run_backward() -> Any:
    return Flow(), vectors()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = (nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.hidden, self.head = nn.Linear(10 * WIDTH, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.first(self.embedding(ids))
        x, _ = self.second(x.contiguous())
        return self.head(self.hidden(x.contiguous().view(len(ids), -1)).relu())


@case("own")
def recurrent_and_contiguous() -> Any:
    return Classifier(Recurrent()), tokens()


class Masked(nn.Module):
    """Leaves out some elements of a weight, as pruning does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


class TakesABatchOnly(Module):
    """Has no number of the batch, layers in another order than called, and weights made of others and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for layer in self.layers[1:3]:
            parametrize.register_parametrization(layer, "weight", Masked())
        parametrizations.orthogonal(self.layers[3])

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        x, y = batch
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return functional.mse_loss(self.head(x), y)


@case("steps")
def takes_a_batch_only() -> Any:
    return TakesABatchOnly(), vectors()


IN_CONTEXT: ContextVar[Tensor] = ContextVar("in_context")
OF_THREAD = threading.local()
QUEUE: Queue[Tensor] = Queue()


class AddsUp(nn.Linear):
    """Leaves penalties in a context variable, in one of the thread, and in a queue."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).tanh()
        IN_CONTEXT.set(IN_CONTEXT.get() + x.square().mean())
        OF_THREAD.penalty = getattr(OF_THREAD, "penalty", 0.0) + x.abs().mean()
        QUEUE.put(x.max(dim=1).values.mean())
        return x


class AddedUp(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(AddsUp(WIDTH, WIDTH) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        token, OF_THREAD.penalty = IN_CONTEXT.set(torch.zeros(())), 0.0
        try:
            loss = functional.mse_loss(self.layers(x), y)
            loss = loss + 0.1 * IN_CONTEXT.get() + 0.1 * OF_THREAD.penalty
            while not QUEUE.empty():
                loss = loss + 0.1 * QUEUE.get()
            return loss
        finally:
            IN_CONTEXT.reset(token)


@case("own")
def variables_of_context_and_thread_and_queues() -> Any:
    return AddedUp(), vectors()


class LimitsWeights(nn.Module):
    """Limits weights in its forward, in ways of Gemma3n and of EEGNet's constraints."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.first.weight.data.clamp_(-0.2, 0.2)
        self.second.weight.data = torch.renorm(self.second.weight.data, p=2, dim=0, maxnorm=0.5)
        return x + self.second(self.first(x).tanh())


@case("own")
def layers_that_limit_weights() -> Any:
    class Limited(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(LimitsWeights() for _ in range(4)))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return functional.mse_loss(self.layers(batch[0]), batch[1])

    return Limited(), vectors()


class Pushes(nn.Linear):
    """Leaves what it returns on a stack and in a dict."""

    def __init__(self, stack: list[Tensor], by_name: dict[int, Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.stack, self.by_name = stack, by_name

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).tanh()
        self.by_name[len(self.stack)] = x.square()
        self.stack.append(x)
        return x


class Pops(Pushes):
    """Takes what was left there last."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.stack.pop() + self.by_name.pop(len(self.stack))
        return nn.Linear.forward(self, x).tanh()


@case("own")
def skips_by_a_stack() -> Any:
    class Stacked(Module):
        def __init__(self) -> None:
            super().__init__()
            stack: list[Tensor] = []
            by_name: dict[int, Tensor] = {}
            layers = (kind(stack, by_name) for kind in (Pushes, Pushes, Pushes, Pops, Pops, Pops))
            self.layers = nn.Sequential(*layers)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return functional.mse_loss(self.layers(x), y)

    return Stacked(), vectors()


class AdaptsItsHead(Layered):
    """Takes a step of the head alone, and trains all by what that head does then (ANIL)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        weights, x = (self.head.weight, self.head.bias), self.model(x)
        inner = functional.mse_loss(functional.linear(x, *weights), y)
        slopes = torch.autograd.grad(inner, weights, create_graph=True)
        adapted = [weight - 0.1 * slope for weight, slope in zip(weights, slopes, strict=True)]
        return functional.mse_loss(functional.linear(x, *adapted), y)


@case("steps")
def a_head_that_adapts() -> Any:
    return AdaptsItsHead(), vectors()


class Undone(nn.Module):
    """Normalizes, and says how that is undone (RevIN)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 0.1
        return (x - mean) / deviation * self.scale, lambda y: y / self.scale * deviation + mean


class Around(nn.Module):
    """Keeps a residual for when a branch is done (hyper-connections)."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        kept = {"gates": [self.gate(x).sigmoid()]}

        def add(branch: Tensor, residual: Tensor = 0.5 * x, *, gate: Tensor = kept["gates"][0]) -> Tensor:
            return residual + gate * branch * kept["gates"][0]

        return self.into(x), {"add": partial(add, gate=kept["gates"][0] + 1)}


class Connected(Module):
    """Such layers, whose functions are called on later stages."""

    def __init__(self) -> None:
        super().__init__()
        self.undone = Undone()
        self.around = nn.ModuleList(Around() for _ in range(3))
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, undo = self.undone(batch[0])
        for around, branch in zip(self.around, self.branches, strict=True):
            inner, later = around(x)
            x = later["add"](branch(inner).tanh())
        return functional.mse_loss(undo(x), batch[1])


@case("steps")
def layers_that_return_functions() -> Any:
    return Connected(), vectors()


class Gated(nn.Module):
    """A layer that calls one that others have too (TabNet)."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.norm = shared, nn.LayerNorm(2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.norm(self.shared(x)).chunk(2, 1)
        return values * gates.sigmoid()


class Attentive(Module):
    """What a layer has computed of the batch is masked again and again, by layers with shared layers in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.gates = nn.ModuleList(nn.ModuleList(map(Gated, self.shared)) for _ in range(3))
        self.masks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = attended = self.first(batch[0])
        prior, outputs = torch.ones_like(x), []
        for mask, gates in zip(self.masks, self.gates, strict=True):
            chosen = (mask(attended) * prior).softmax(1)
            prior = (1.3 - chosen) * prior
            attended = chosen * x
            for gate in gates:
                attended = gate(attended)
            outputs.append(attended.relu())
        return functional.mse_loss(torch.stack(outputs).sum(0), batch[1])


@case("steps")
def layers_with_shared_layers_in_them() -> Any:
    return Attentive(), vectors()

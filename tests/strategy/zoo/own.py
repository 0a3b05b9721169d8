"""Models as users write them by hand: how layers are held and called, and what flows between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional

from tests.strategy.zoo.case import NUM_CLASSES, Classifier, Regressor, case, images, tokens, vectors

WIDTH = 16
VOCABULARY = 40


def block(width: int = WIDTH) -> nn.Sequential:
    """A layer as they come in lists."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def blocks(number: int = 6) -> nn.ModuleList:
    """A list of layers."""
    return nn.ModuleList(block() for _ in range(number))


@case("own")
def sequential() -> Any:
    return Regressor(nn.Sequential(*blocks())), vectors()


class Scaled(nn.Module):
    """A layer of few parameters, for values of many numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale + self.shift)


@case("own")
def large_values() -> Any:
    """A microbatch, and what crosses, of more than 16 MiB."""

    def make(generator: torch.Generator) -> Any:
        x = torch.randn(4, (4 * 2**20) // WIDTH + 1, WIDTH, generator=generator)
        return x, x.roll(1, -1)

    return Regressor(nn.Sequential(*(Scaled() for _ in range(4)))), make


class Ranged(nn.Linear):
    """Finds the size of a buffer in its first forward, as observers of quantization do."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if not self.largest.numel():
                self.largest.resize_(len(self.weight)).fill_(1.0)
            self.largest.copy_(self.weight.abs().amax(1))
        return torch.tanh(functional.linear(x, self.weight / self.largest.clone()[:, None], self.bias))


@case("own")
def buffers_that_layers_resize() -> Any:
    return Regressor(nn.Sequential(*(Ranged(WIDTH) for _ in range(4)))), vectors()


class Conjugating(nn.Module):
    """Returns what is conjugated as it is read (torch's lazy bit), and a view of it that is negated so."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        z, x = value
        out = torch.complex(torch.tanh(self.real(z.real) - x), torch.tanh(self.imaginary(z.imag) + z.real)).conj()
        return out, out.imag


class Conjugates(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        z, x = super().forward((torch.complex(x, x.flip(1)), x))
        return z.imag + z.real + x


@case("own")
def complex_values_that_layers_conjugate() -> Any:
    return Regressor(Conjugates(*(Conjugating() for _ in range(4)))), vectors()


class Normalised(nn.Linear):
    """Normalises its weight in each training forward, as EDM2 does (magnitude-preserving layers)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.weight.copy_(functional.normalize(self.weight, dim=1))
        return torch.tanh(functional.linear(x, functional.normalize(self.weight, dim=1), self.bias))


@case("own")
def weights_that_layers_normalise() -> Any:
    return Regressor(nn.Sequential(*(Normalised(WIDTH, WIDTH) for _ in range(4)))), vectors()


@case("own")
def traced_by_fx() -> Any:
    """Layers in lists, which lie below modules that nobody calls."""
    return Regressor(torch.fx.symbolic_trace(nn.Sequential(*blocks(), nn.Linear(WIDTH, WIDTH)))), vectors()


class ChainOfAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.conv3 = nn.Conv2d(8, 16, 3, stride=2)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.norm1(self.conv1(x)))
        x = functional.max_pool2d(functional.relu(self.norm2(self.conv2(x))), 2)
        x = functional.relu(self.conv3(x)).mean((2, 3))
        return self.fc2(torch.relu(self.fc1(x)))


@case("own")
def chain_of_attributes() -> Any:
    return Classifier(ChainOfAttributes()), images(16)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=4, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        output, (_, cell) = self.lstm(self.embedding(ids))
        return self.head(self.norm(output[:, -1] + cell[-1]))


@case("own")
def lstm_beside_others() -> Any:
    return Classifier(Recurrent()), tokens()


class TextBesideALargeEncoder(nn.Module):
    """Batches of text alone, which do not call the encoder of images that holds nearly all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(160, 160) for _ in range(3))})
        self.language = blocks(4)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, image: Tensor | None = None) -> Tensor:
        if image is not None:
            for layer in self.vision["layers"]:
                image = layer(image)
            x = x + image
        for layer in self.language:
            x = x + layer(x)
        return self.head(x)


@case("own")
def text_beside_a_large_encoder() -> Any:
    return Regressor(TextBesideALargeEncoder()), vectors(WIDTH)


class OverridesForward(nn.Module):
    """Calls other layers than those that it has from its base class, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*blocks(3))
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.third, self.fourth = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))))


@case("own")
def list_that_is_not_called() -> Any:
    return Regressor(OverridesForward()), vectors(WIDTH)


class Reversing(torch.autograd.Function):
    """Keeps its result alone, and computes its input again from that in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, couplings: Any, *parameters: Tensor) -> Tensor:
        for coupling in couplings:
            x = coupling(x)
        ctx.couplings, ctx.result = couplings, x.detach()
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,), x, found = gradients, ctx.result, []
        for coupling in reversed(ctx.couplings):
            with torch.no_grad():
                x = coupling.inverse(x)
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                gradient, *others = torch.autograd.grad(coupling(leaf), (leaf, *coupling.parameters()), gradient)
            found = [*others, *found]
        return gradient, None, *found


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_second, self.of_first = nn.Linear(WIDTH // 2, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        first = first + torch.tanh(self.of_second(second))
        return torch.cat([first, second + torch.tanh(self.of_first(first))], -1)

    def inverse(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        second = second - torch.tanh(self.of_first(first))
        return torch.cat([first - torch.tanh(self.of_second(second)), second], -1)


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return Reversing.apply(x, self.couplings, *self.couplings.parameters())  # type: ignore[no-any-return]


class Reversibles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.second = Reversible(), nn.Linear(WIDTH, WIDTH), Reversible()
        self.third, self.fourth = Reversible(), Reversible()

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(self.between(self.first(x)))))


@case("own")
def reversible() -> Any:
    return Regressor(Reversibles()), vectors(WIDTH)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [8, 16, 16]
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.downs = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in zip([8, *widths], widths, strict=False))
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(2 * b if i else b, a, 2, 2)
            for i, (a, b) in enumerate(zip([16, 8, 8], reversed(widths), strict=True))
        )
        self.head = nn.Conv2d(16, NUM_CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for down in self.downs:
            skips.append(x)
            x = functional.silu(down(x))
        for up, skip in zip(self.ups, reversed(skips), strict=True):
            x = torch.cat([functional.silu(up(x)), skip], 1)
        return self.head(x).mean((2, 3))


@case("own")
def unet() -> Any:
    return Classifier(UNet()), images(16)


class InALoop(nn.Module):
    """Calls a list of layers in a way of its own; `step` is what happens at each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks()

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.step(layer, x)
        return x


@case("own")
def residual_loop() -> Any:
    return Regressor(InALoop()), vectors()


class ScaledResiduals(InALoop):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.full((WIDTH,), 0.5)) for _ in self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = x + scale * layer(x)
        return x


@case("own")
def zipped_with_parameters() -> Any:
    return Regressor(ScaledResiduals()), vectors()


class ZippedLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attentions, self.norms, self.mlps = blocks(4), nn.ModuleList(map(nn.LayerNorm, 4 * [WIDTH])), blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        for attention, norm, mlp in zip(self.attentions, self.norms, self.mlps, strict=True):
            x = x + attention(x)
            x = x + mlp(norm(x))
        return x


@case("own")
def zipped_lists() -> Any:
    return Regressor(ZippedLists()), vectors()


class Repeated(nn.Module):
    """As ALBERT: few layers, each called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(WIDTH, WIDTH), blocks(2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            for layer in self.layers:
                x = x + layer(x)
        return self.last(x)


@case("own")
def layers_called_repeatedly() -> Any:
    return Regressor(Repeated()), vectors()


class MaskFromStem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(WIDTH, WIDTH), blocks(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        keep = x > 0
        for layer in self.layers:
            x = x + layer(x) * keep
        return x.masked_fill(~keep, 0.1)


@case("own")
def boolean_mask_from_stem() -> Any:
    return Regressor(MaskFromStem()), vectors()


class PaddingFromEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        padding = x.abs().sum(-1) == 0
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        x = x.masked_fill(padding[..., None], 0)
        return self.head(x.sum(1) / (~padding).sum(1, keepdim=True))


@case("own")
def padding_mask_from_embeddings() -> Any:
    return Classifier(PaddingFromEmbeddings()), tokens()


class EarlyArgmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers, self.table = nn.Linear(WIDTH, WIDTH), blocks(4), nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        chosen = x.argmax(-1)
        for layer in self.layers:
            x = x + layer(x)
        return x + self.table(chosen)


@case("own")
def early_argmax() -> Any:
    return Regressor(EarlyArgmax()), vectors()


class NoiseInTheMiddle(InALoop):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + layer(x)
            if index == 2:
                x = x + 0.1 * torch.randn_like(x)
        return x


@case("own", draws=True)
def noise_in_the_middle() -> Any:
    return Regressor(NoiseInTheMiddle()), vectors()


@case("own", draws=True)
def dropout() -> Any:
    return Regressor(nn.Sequential(*(nn.Sequential(one, nn.Dropout(0.1)) for one in blocks()))), vectors()


class InPlaceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(5)]
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@case("own")
def in_place_relu_first() -> Any:
    return Regressor(InPlaceFirst()), vectors()


class RawParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 17, WIDTH) / 10)
        self.layers = blocks(4)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.position
        for layer in self.layers:
            x = x + layer(x + x.mean(1, keepdim=True))
        return self.head(x[:, 0] * self.scale)


@case("own")
def raw_parameters() -> Any:
    return Classifier(RawParameters()), images(16)


class Doubled(torch.autograd.Function):
    """A gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor, None


class CustomFunction(InALoop):
    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + Doubled.apply(layer(x), 2.0)


@case("own")
def custom_autograd_function() -> Any:
    return Regressor(CustomFunction()), vectors()


class DictsBetweenLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks()

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": x, "sum": torch.zeros_like(x), "count": 0}
        for layer in self.layers:
            y = layer(state["x"])
            state = {"x": state["x"] + y, "sum": state["sum"] + y, "count": state["count"] + 1}
        return state["x"] + state["sum"] / state["count"]


@case("own")
def dicts_between_layers() -> Any:
    return Regressor(DictsBetweenLayers()), vectors()


class ModuleDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"level_{index}": block() for index in range(6)})
        self.order = [f"level_{index}" for index in (0, 2, 1, 3, 5, 4)]

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = x + self.layers[name](x)
        return x


@case("own")
def module_dict_in_another_order() -> Any:
    return Regressor(ModuleDict()), vectors()


class DenseSkips(InALoop):
    """As DenseNet: every layer sees all before it."""

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.stack(seen).mean(0)))
        return torch.stack(seen).sum(0)


@case("own")
def dense_skips() -> Any:
    return Regressor(DenseSkips()), vectors()


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.joint = nn.Sequential(*blocks(2)), nn.Sequential(*blocks(2)), block()

    def forward(self, x: Tensor) -> Tensor:
        return self.joint(self.left(x) * torch.sigmoid(self.right(x)))


@case("own")
def two_branches() -> Any:
    return Regressor(TwoBranches()), vectors()


class MovingAverageInTheMiddle(InALoop):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.register_buffer("spread", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x + layer(x)
            if index == 3:
                self.centre.mul_(0.9).add_(0.1 * x.detach().mean(0))
                self.spread = 0.9 * self.spread + 0.1 * x.detach().std(0)
                x = (x - self.centre) / self.spread
        return x


@case("own")
def buffer_in_the_middle() -> Any:
    return Regressor(MovingAverageInTheMiddle()), vectors()


@case("own")
def batch_norm() -> Any:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(5)]
    return Regressor(nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))), vectors(batch_size=32)


class SwitchesModes(Regressor):
    """Labels its batch by itself in evaluation mode, as for pseudo-labels, and trains on in training mode."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            labels = self.model(batch[0]).tanh()
        self.model.train()
        return functional.mse_loss(self.model(batch[0]), batch[1] + labels)


@case("own")
def batch_norm_in_both_modes() -> Any:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(5)]
    return SwitchesModes(nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))), vectors(batch_size=32)


class Checkpointed(InALoop):
    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


@case("own")
def activation_checkpointing() -> Any:
    return Regressor(Checkpointed()), vectors()


class Routed(nn.Module):
    """Experts that get the samples for which an early layer chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.last = nn.Linear(WIDTH, 3), blocks(3), blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            here = (chosen == index).nonzero()[:, 0]
            y = y.index_add(0, here, expert(x[here]) * weights[here, index, None])
        for layer in self.last:
            y = y + layer(y)
        return y


@case("own")
def experts_by_index() -> Any:
    return Regressor(Routed()), vectors()


class RoutedWithGaps(nn.Module):
    """Experts without samples are not called; only this layer's own code knows which."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 8), blocks(8)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            here = weights.argmax(-1) == index
            if not here.any():
                continue
            out[here] += expert(x[here]) * weights[here, index, None]
        return x + out


@case("own")
def experts_left_out() -> Any:
    return Regressor(nn.Sequential(block(), RoutedWithGaps(), block(), block())), vectors()


class Attention(nn.Module):
    """Holds its parts; the model calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class PartsCalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.layers = nn.ModuleList(Attention() for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            scores = torch.einsum("bid,bjd->bij", layer.query(x), layer.key(x)) / 4
            x = x + layer.out(torch.einsum("bij,bjd->bid", scores.softmax(-1), layer.value(x)))
        return self.head(x.mean(1))


@case("own")
def parts_of_layers_called() -> Any:
    return Classifier(PartsCalled()), tokens()


class Packed(nn.Module):
    """Leaves padding out by the batch's own mask, so that microbatches of one form have other numbers of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, NUM_CLASSES)
        self.layers = blocks(4)

    def forward(self, ids: Tensor) -> Tensor:
        keep = (ids > 0) & (ids % 5 != 0)
        x = self.embedding(ids[keep])
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.new_zeros(*ids.shape, WIDTH).masked_scatter(keep[..., None], x).mean(1))


@case("own")
def tokens_packed_by_a_mask() -> Any:
    return Classifier(Packed()), tokens()


@case("own")
def transformer_of_torch() -> Any:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 4)
            self.head = nn.Linear(WIDTH, NUM_CLASSES)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=ids == 0).mean(1))

    return Classifier(Encoder()), tokens()

"""Steps that do more than to call one model once: several calls, several losses, several models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.strategy.zoo.case import NUM_CLASSES, Module, case, images, tokens, vectors
from tests.strategy.zoo.own import VOCABULARY, WIDTH, InALoop, block, blocks


@case("steps")
def deep_supervision() -> Any:
    class DeepSupervision(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = blocks(4)
            self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.layers)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            losses = []
            for layer, head in zip(self.layers, self.heads, strict=True):
                x = x + layer(x)
                losses.append(functional.mse_loss(head(x), y))
            return sum(losses[:-1], losses[-1])

    return DeepSupervision(), vectors()


@case("steps")
def loss_of_an_early_layer() -> Any:
    class EarlyLoss(Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.model = nn.Linear(WIDTH, WIDTH), InALoop()

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
            x, y = batch
            z = self.stem(x)
            penalty = z.abs().mean()
            loss = functional.mse_loss(self.model(z), y)
            self.log("penalty", penalty)
            return {"loss": loss + 0.1 * penalty}

    return EarlyLoss(), vectors()


@case("steps")
def encode_and_call_twice() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Sequential(*blocks(3)), nn.Sequential(*blocks(3))

        def encode(self, x: Tensor) -> Tensor:
            return self.encoder(x)

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.encode(x))

    class EncodeAndCall(Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            code = self.model.encode(x)
            first, second = self.model(x), self.model(x.flip(1))
            return functional.mse_loss(first, y) + functional.mse_loss(second, y) + 0.1 * code.square().mean()

    return EncodeAndCall(), vectors()


@case("steps")
def siamese() -> Any:
    class Siamese(Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(*blocks(5), nn.Linear(WIDTH, 8))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            return (1 - functional.cosine_similarity(self.encoder(x), self.encoder(y))).mean()

    return Siamese(), vectors()


@case("steps")
def autoencoder() -> Any:
    class Autoencoder(Module):
        """That of Lightning's introduction."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, WIDTH))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            z = self.encoder(x)
            return functional.mse_loss(self.decoder(z), x)

    return Autoencoder(), vectors()


@case("steps", draws=True)
def variational_autoencoder() -> Any:
    class Variational(Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU())
            self.mean, self.log_variance = nn.Linear(32, 4), nn.Linear(32, 4)
            self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, WIDTH))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            hidden = self.encoder(x)
            mean, log_variance = self.mean(hidden), self.log_variance(hidden)
            z = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
            return functional.mse_loss(self.decoder(z), x) + 0.01 * divergence

    return Variational(), vectors()


@case("steps")
def vq_vae() -> Any:
    class Quantiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Embedding(12, 8)

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            chosen = torch.cdist(z, self.codes.weight).argmin(-1)
            quantised = self.codes(chosen)
            loss = functional.mse_loss(quantised, z.detach()) + 0.25 * functional.mse_loss(z, quantised.detach())
            return z + (quantised - z).detach(), loss  # the straight-through estimator

    class VqVae(Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(block(), block(), nn.Linear(WIDTH, 8))
            self.quantiser = Quantiser()
            self.decoder = nn.Sequential(nn.Linear(8, WIDTH), block(), block())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            z, loss = self.quantiser(self.encoder(x))
            return functional.mse_loss(self.decoder(z), x) + loss

    return VqVae(), vectors()


@case("steps")
def tied_embedding_and_head() -> Any:
    class Tied(Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layers = nn.Embedding(VOCABULARY, WIDTH), blocks(4)
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for layer in self.layers:
                x = x + layer(x + x.cumsum(1) / ids.shape[1])
            return self.head(x)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids, _ = batch
            return functional.cross_entropy(self(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return Tied(), tokens()


@case("steps")
def loss_with_a_buffer() -> Any:
    """Modules of the user's own with a buffer and no parameter: the loss, and what comes first."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.full((1, WIDTH), 0.1))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x - self.center - y).square().mean()

    class WithBuffers(Module):
        def __init__(self) -> None:
            super().__init__()
            self.scaled, self.layers, self.criterion = Scaled(), blocks(4), Centred()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            x = self.scaled(x)
            for layer in self.layers:
                x = x + layer(x)
            return self.criterion(x, y)

    return WithBuffers(), vectors()


@case("steps")
def head_given_the_embedding() -> Any:
    """As Perceiver's: a module is an argument of another, which uses its weight and one of its own."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(VOCABULARY))

        def forward(self, x: Tensor, embedding_layer: nn.Module) -> Tensor:
            return x @ embedding_layer.weight.transpose(0, 1) + self.bias

    class Given(Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layers, self.head = nn.Embedding(VOCABULARY, WIDTH), blocks(6), Head()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids, _ = batch
            x = self.embedding(ids[:, :-1])
            for layer in self.layers:
                x = x + layer(x + x.cumsum(1) / ids.shape[1])
            x = self.head(x, embedding_layer=self.embedding)
            return functional.cross_entropy(x.view(-1, VOCABULARY), ids[:, 1:].flatten())

    return Given(), tokens()


@case("steps")
def frozen_backbone() -> Any:
    class Frozen(Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(*blocks(4)).requires_grad_(False)
            self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            with torch.no_grad():
                features = self.backbone(x)
            return functional.mse_loss(self.head(features), y)

    return Frozen(), vectors()


@case("steps")
def teacher_and_student() -> Any:
    class Distillation(Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Sequential(*blocks(4)).requires_grad_(False)
            self.student = nn.Sequential(*blocks(3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, _ = batch
            with torch.no_grad():
                target = self.teacher(x)
            return functional.mse_loss(self.student(x), target)

    return Distillation(), vectors()


@case("steps")
def two_towers_of_two_inputs() -> Any:
    class TwoTowers(Module):
        def __init__(self) -> None:
            super().__init__()
            self.text = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks(3))
            self.image = nn.Sequential(nn.Conv2d(3, WIDTH, 4, 4), nn.ReLU(), nn.Conv2d(WIDTH, WIDTH, 4), nn.Flatten())
            self.head = nn.Linear(2 * WIDTH, NUM_CLASSES)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            joint = torch.cat([self.text(batch["ids"]).mean(1), self.image(batch["pixels"])], 1)
            return functional.cross_entropy(self.head(joint), batch["labels"])

    def make(generator: torch.Generator) -> Any:
        (ids, labels), (pixels, _) = tokens()(generator), images(16, 8)(generator)
        return {"ids": ids, "pixels": pixels, "labels": labels}

    return TwoTowers(), make


@case("steps")
def multitask() -> Any:
    class Multitask(Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.heads = nn.Sequential(*blocks(4)), nn.ModuleDict({"a": block(), "b": block()})

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            shared = self.trunk(x)
            return sum(functional.mse_loss(head(shared), y) for head in self.heads.values())

    return Multitask(), vectors()


@case("steps", needs="transformers")
def bert_and_head() -> Any:
    from tests.strategy import families

    class BertAndHead(Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = families.make("bert").bert
            self.head = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids, y = batch
            hidden = self.bert(ids, attention_mask=(ids > 0).long()).last_hidden_state
            return functional.cross_entropy(self.head(hidden[:, 0]), y)

    return BertAndHead(), tokens()

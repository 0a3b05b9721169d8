"""Layers whose buffers follow what they see: averages, codebooks, centers, queues."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.strategy.zoo.case import Module, case, vectors
from tests.strategy.zoo.own import WIDTH

NUM_CODES = 8


class Codebook(nn.Module):
    """Codes that are moving averages of what is next to them (VQ-VAE), written as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randn(NUM_CODES, WIDTH)
        self.register_buffer("codes", codes)
        self.register_buffer("sums", codes.clone())
        self.register_buffer("numbers", torch.ones(NUM_CODES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = torch.cdist(x, self.codes).argmin(1)
        found = self.codes[code]
        if self.training:
            with torch.no_grad():
                chosen = functional.one_hot(code, NUM_CODES).to(x.dtype)
                self.numbers.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.data.lerp_(chosen.t() @ x, 0.1)
                self.codes.data.copy_(self.sums / self.numbers.clamp_min(0.1).unsqueeze(1))
        return x + (found - x).detach(), functional.mse_loss(x, found)


class Running(nn.Module):
    """Normalises by what it has seen before, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        result = x - self.mean
        self.seen += len(x)
        share = len(x) / int(self.seen)
        self.mean = self.mean + share * (x.detach().mean(0) - self.mean)  # another tensor
        return result


class Balanced(nn.Module):
    """Experts that are chosen by scores and a bias, which follows how often they are (DeepSeek-V3)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        chosen = functional.one_hot((scores + self.bias).argmax(1), 4).to(x.dtype)
        if self.training:
            load = chosen.sum(0).detach()
            self.bias.add_(0.1 * (load.mean() - load).sign())
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return x + ((chosen * scores).unsqueeze(2) * outputs).sum(1)


class Turning(nn.Module):
    """Angles of positions, computed once; how many there are is an attribute (rotary-embedding-torch)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("angles", torch.zeros(64, WIDTH // 2), persistent=False)
        self.num_known: Any = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.num_known < x.shape[1]:
            self.angles[: x.shape[1]] = torch.arange(x.shape[1])[:, None] * torch.logspace(-2, 0, WIDTH // 2)
            self.num_known = x.shape[1]
        turned = torch.view_as_complex(self.linear(x).unflatten(-1, (-1, 2)).contiguous())
        angles = self.angles[: x.shape[1]]
        return x + torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


class Averaged(Module):
    """Such layers among others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), Running(), nn.Tanh(), Balanced())
        self.codebook = Codebook()
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), Running(), Balanced(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, commitment = self.codebook(self.first(batch[0]))
        return functional.mse_loss(self.last(x), batch[1]) + 0.25 * commitment


@case("own", whole=True)
def layers_that_average_what_they_see() -> Any:
    return Averaged(), vectors()


class Stretching(Turning):
    """A cache that is made anew where it is too short, and whose length is a tensor (dynamic scaling)."""

    def forward(self, x: Tensor) -> Tensor:
        length = torch.tensor(x.shape[1])
        if length > self.num_known:
            steps = torch.arange(x.shape[1])[:, None] / length
            self.register_buffer("angles", steps * torch.logspace(-2, 0, WIDTH // 2), persistent=False)
            self.num_known = length
        return super().forward(x)


class Turned(Module):
    """Layers with a cache in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Turning(), Stretching(), Turning(), Stretching(), nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.stack([batch[0], batch[1], batch[0] * batch[1]], 1)
        return functional.mse_loss(self.layers(x).mean(1), batch[1])


@case("own", whole=True)
def layers_that_cache_angles() -> Any:
    return Turned(), vectors()


class Contrast(nn.Module):
    """A loss with a center (DINO) and a queue (MoCo), which the rows of the batch enter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, WIDTH))
        self.register_buffer("queue", functional.normalize(torch.randn(24, WIDTH), dim=1))
        self.register_buffer("next", torch.zeros(1, dtype=torch.long))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        wanted = ((teacher - self.center) / 0.5).softmax(1)
        loss = -(wanted * student.log_softmax(1)).sum(1).mean()
        keys = functional.normalize(teacher, dim=1)
        negatives, positives = student @ self.queue.clone().t(), (student * keys).sum(1, keepdim=True)
        loss = loss + functional.cross_entropy(torch.cat([positives, negatives], 1), torch.zeros(len(keys)).long())
        with torch.no_grad():
            mean = teacher.mean(0, keepdim=True)
            if dist.is_initialized():  # as published losses do for replicas
                dist.all_reduce(mean)
                mean = mean / dist.get_world_size()
            self.center = 0.9 * self.center + 0.1 * mean
            rows = (int(self.next) + torch.arange(len(keys))) % len(self.queue)
            self.queue[rows] = keys
            self.next[0] = (rows[-1] + 1) % len(self.queue)
        return loss


class Distilled(Module):
    """A student and a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )
        self.teacher.requires_grad_(False)
        self.loss = Contrast()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Tensor = self.loss(self.student(batch[0]), self.teacher(batch[1]))
        return loss


@case("own", whole=True)
def losses_with_centers_and_queues() -> Any:
    return Distilled(), vectors()


class Counting(nn.Module):
    """Nearly all layers of a model, and an average of what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


class Counted(Module):
    """A head beside such a model, which is divided all the same; the buffer decides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = Counting(), nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.mse_loss(self.head(self.model(batch[0])), batch[1])

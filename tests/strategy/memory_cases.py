"""Models whose memory is foretold, and how they are trained: kind of step, model, optimizer, options."""

import lightning as L
import torch
from torch import nn, optim
from transformers import LlamaConfig, LlamaForCausalLM

from tests.thorough import THOROUGH

TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Module(L.LightningModule):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model, self.optimizer = model, optimizer

    def configure_optimizers(self):
        return self.optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


class Language(Module):
    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        if loss.isnan():  # looks at a value
            raise ValueError("NaN")
        self.log("loss", loss)
        return loss


class CallsSome(Language):
    """Has large weights that no step calls, and some that the step uses by itself."""

    def __init__(self, *args):
        super().__init__(*args)
        self.later, self.bias = nn.Linear(512, 512), nn.Parameter(torch.zeros(256))

    def training_step(self, batch, batch_idx):
        output = self.model(input_ids=batch[0])
        return nn.functional.cross_entropy((output.logits + self.bias).flatten(0, 1), batch[0].flatten())


class Returns(Language):
    """Returns what is large beside the loss, some of it with its graph, and numbers."""

    def training_step(self, batch, batch_idx):
        output = self.model(input_ids=batch[0], labels=batch[0])
        predicted = output.logits.argmax(-1)
        return {"loss": output.loss, "logits": output.logits, "predicted": predicted, "number": output.loss.detach()}


class LeavesBehind(Language):
    """Keeps outputs until the epoch ends, as `on_train_epoch_end` wants them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.kept = []

    def training_step(self, batch, batch_idx):
        output = self.model(input_ids=batch[0], labels=batch[0])
        self.kept = [output.logits[:, -4:].detach()]
        return output.loss


class Validated(Language):
    """Has outputs in its validation that nobody looks at."""

    def validation_step(self, batch, batch_idx):
        return self.model(input_ids=batch[0], labels=batch[0]).logits


class Moving(Language):
    """Has large buffers of its own, which the step changes by values of stages."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("mean", torch.zeros(2048, 64))
        self.register_buffer("early", torch.zeros(2048, 64))

    def training_step(self, batch, batch_idx):
        x = self.model.model.embed_tokens(batch[0])
        self.early.mul_(0.9).add_(x.detach().mean((0, 1)))
        output = self.model(inputs_embeds=x, labels=batch[0], output_hidden_states=True)
        self.mean = 0.9 * self.mean + output.hidden_states[-1].detach().mean((0, 1))
        return output.loss


class Images(Module):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])


class Pairs(Images):
    """Compares all samples of a batch with one another."""

    def __init__(self, *args):
        super().__init__(*args)
        self.temperature = nn.Parameter(torch.ones(()))

    def training_step(self, batch, batch_idx):
        vectors = self.model(batch[0]).flatten(1)
        return nn.functional.cross_entropy(self.temperature * vectors @ vectors.T, torch.arange(len(vectors)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x):
        return x + self.norm(self.convolution(x)).relu()


def resnet():
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Block() for _ in range(4)), head)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.LSTM(48, 48, batch_first=True) for _ in range(2)), nn.Linear(48, 10)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2).repeat(1, 1, 16)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x[:, -1])


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **options}))


def frozen():
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(False)
    return model


def sgd(parameters):
    return optim.SGD(parameters, 0.1)


CASES = {
    "resnet, momentum, zbv": (
        Images,
        resnet,
        lambda p: optim.SGD(p, 0.1, momentum=0.9),
        {"schedule": "zbv", "num_microbatches": 6},
        {},
    ),
    "tied, bf16-mixed, AdamW of all at once, selective": (
        Language,
        lambda: llama(tie_word_embeddings=True),
        lambda p: optim.AdamW(p, foreach=True),
        {"activation_checkpointing": "selective", "offload_activations": True},
        {"precision": "bf16-mixed"},
    ),
    "frozen, bf16-true, sums in 32 bits, accumulated, Adafactor, gpipe, full": (
        Language,
        frozen,
        optim.Adafactor,
        {"schedule": "gpipe", "precise_gradients": True, "activation_checkpointing": "full"},
        {"precision": "bf16-true", "accumulate_grad_batches": 2},
    ),
    "returned, Adam, clipped": (Returns, lambda: llama(vocab_size=4096), optim.Adam, {}, {"gradient_clip_val": 0.1}),
    "weights that no step calls": (CallsSome, llama, optim.AdamW, {}, {}),
    "returned by four stages, SGD": (
        Returns,
        lambda: llama(vocab_size=2048, num_hidden_layers=4),
        sgd,
        {"schedule": "interleaved_1f1b"},
        {},
    ),
    "left behind, clipped by value": (
        LeavesBehind,
        lambda: llama(vocab_size=4096),
        optim.Adam,
        {},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
    ),
    "loss over the batch, large logits": (
        Language,
        lambda: llama(vocab_size=4096),
        sgd,
        {"loss_over": "batch", "schedule": "gpipe"},
        {},
    ),
    "loss over the batch, returned, four stages": (
        Returns,
        lambda: llama(vocab_size=2048, num_hidden_layers=4),
        sgd,
        {"loss_over": "batch", "schedule": "looped_bfs"},
        {"precision": "bf16-mixed"},
    ),
    "pairs": (Pairs, resnet, sgd, {"loss_over": "batch", "schedule": "gpipe"}, {}),
    "buffers of four stages": (
        Moving,
        lambda: llama(num_hidden_layers=4),
        sgd,
        {"schedule": "interleaved_1f1b"},
        {},
    ),
    "buffers of two stages": (Moving, llama, sgd, {}, {}),
    "validated between, offloaded, full": (
        Validated,
        lambda: llama(num_hidden_layers=4),
        optim.RMSprop,
        {"offload_activations": True, "activation_checkpointing": "full"},
        {"val_check_interval": 1},
    ),
    "divided once an iteration, accumulated": (
        Language,
        llama,
        optim.AdamW,
        {"data_parallel_size": 2, "fully_shard": "zero1"},
        {"accumulate_grad_batches": 2},
    ),
    "divided weights too, clipped": (
        Language,
        lambda: llama(num_hidden_layers=4),
        optim.AdamW,
        {"data_parallel_size": 2, "fully_shard": "zero3"},
        {"gradient_clip_val": 0.1},
    ),
    "divided, returned": (
        Returns,
        lambda: llama(vocab_size=2048),
        sgd,
        {"data_parallel_size": 2, "fully_shard": "zero3"},
        {},
    ),
    "recurrent, replicas": (Images, Recurrent, optim.Adam, {"data_parallel_size": 2}, {}),
    "divided": (Language, llama, optim.AdamW, {"data_parallel_size": 2, "fully_shard": "zero2"}, {}),
    "divided, many weights": (
        Language,
        lambda: llama(num_hidden_layers=10, hidden_size=128, intermediate_size=512),
        lambda p: optim.SGD(p, 0.1),
        {"data_parallel_size": 2, "fully_shard": "zero2", "num_microbatches": 6},
        {},
    ),
}
_LIKE_OTHERS = (
    *("returned by four stages, SGD", "left behind, clipped by value", "loss over the batch, returned, four stages"),
    *("buffers of two stages", "divided, returned", "pairs"),
)
if not THOROUGH:
    CASES = {name: case for name, case in CASES.items() if name not in _LIKE_OTHERS}

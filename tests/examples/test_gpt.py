import sys

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.flop_counter import FlopCounterMode

from lightning_pfo.core.errors import ConfigurationError
from tests.example_scripts import load_example

gpt = load_example("gpt")
TINY = gpt.model.GptConfig(num_blocks=2, width=32, num_heads=2, sequence_length=32)
TINY_DATA = gpt.data.TextConfig(sequence_length=32, batch_size=8, max_bytes=40_000)


def flops_of(layer, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        y = layer(x)
    return y, counter.get_total_flops()


def test_equal_numbers_of_layers_are_unequal_work():
    x, flops = torch.zeros(4, 64, dtype=torch.long), []
    for layer in gpt.model.Gpt(gpt.model.GptConfig()).model:
        x, of_layer = flops_of(layer, x)
        flops.append(of_layer)
    assert x.shape == (4, 64, 256)
    stages = [sum(flops[start : start + 3]) for start in range(0, 12, 3)]
    assert len(flops) == 12
    assert stages[0] < stages[3] < stages[1] == stages[2]


def test_later_bytes_do_not_change_earlier_predictions():
    model = gpt.model.Gpt(TINY).model.eval()
    text = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(0))
    changed = text.clone()
    changed[0, 20:] = 0
    torch.testing.assert_close(model(text)[0, :20], model(changed)[0, :20])
    assert not torch.allclose(model(text)[0, 20:], model(changed)[0, 20:])


def test_windows_predict_the_next_byte_and_never_overlap():
    windows = gpt.data.Windows(bytes(range(10)), 3)
    pairs = [tuple(part.tolist() for part in windows[i]) for i in range(len(windows))]
    assert pairs == [([0, 1, 2], [1, 2, 3]), ([3, 4, 5], [4, 5, 6]), ([6, 7, 8], [7, 8, 9])]


def test_text_is_the_same_each_time_and_real():
    text = gpt.data.read_stdlib(50_000)
    assert text == gpt.data.read_stdlib(50_000)
    assert len(text) == 50_000
    assert b"import" in text


def test_training_and_validation_text_are_apart():
    data = gpt.data.StdlibText(TINY_DATA)
    assert len(data.train_set.text) == 36_000
    assert len(data.val_set.text) == 4_000
    joined = bytes([*data.train_set.text.tolist(), *data.val_set.text.tolist()])
    assert joined == gpt.data.read_stdlib(40_000)


def test_batches_are_whole():
    data = gpt.data.StdlibText(TINY_DATA)
    assert {batch[0].shape for loader in (data.train_dataloader(), data.val_dataloader()) for batch in loader} == {
        (8, 32)
    }


def test_too_little_text_is_refused():
    with pytest.raises(ConfigurationError, match=r"2000 bytes give 56 and 6 sequences. Raise data.max_bytes"):
        gpt.data.StdlibText(gpt.data.TextConfig(sequence_length=32, batch_size=8, max_bytes=2000))


def test_it_learns_on_one_device():
    seed_everything(0, verbose=False)
    module = gpt.model.Gpt(TINY)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=20,
        limit_val_batches=1,
        val_check_interval=20,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, gpt.data.StdlibText(TINY_DATA))
    assert trainer.callback_metrics["val_loss"] < 4.5  # log(256) = 5.5 without learning
    assert trainer.callback_metrics["train_loss"] < 4.5


SMALL = {
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
T5 = {
    "vocab_size": 256,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


@pytest.mark.parametrize(
    ("family", "task", "options"),
    [("llama", "next_byte", SMALL), ("bert", "hidden_bytes", SMALL), ("t5", "second_half", T5)],
)
def test_models_of_transformers_learn_on_one_device(family, task, options):
    seed_everything(0, verbose=False)
    config = gpt.huggingface.TransformersConfig(family=family, task=task, options=options)
    module, optimizer = (made := gpt.train.make_model(config)), made.configure_optimizers()
    text = gpt.data.Windows(b"abcdefghijklmnop" * 64, 32)
    batch = [torch.stack(parts) for parts in zip(*(text[index] for index in range(8)), strict=True)]
    losses = []
    for _ in range(30):
        losses.append(module.training_step(batch, 0))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.6 * losses[0]


def test_hidden_bytes_are_hidden_and_others_are_not_asked_for():
    config = gpt.huggingface.TransformersConfig(family="bert", task="hidden_bytes", options=SMALL)
    text = torch.arange(1, 13)[None]
    inputs = gpt.train.make_model(config)._inputs((text, text))
    assert inputs["input_ids"].tolist() == [[256, 2, 3, 4, 5, 6, 256, 8, 9, 10, 11, 12]]
    assert inputs["labels"].tolist() == [[1, *5 * [-100], 7, *5 * [-100]]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "next"}, "model.task is one of next_byte, hidden_bytes, second_half; got 'next'"),
        ({"family": "lama"}, "got 'lama'. Did you mean llama"),
        ({"family": "llama", "task": "hidden_bytes"}, "no model of model.family=llama, model.task=hidden_bytes"),
        ({"options": {"hidden_size": 30, "num_attention_heads": 4}}, r"hidden size \(30\) is not a multiple"),
    ],
)
def test_models_that_transformers_does_not_have_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        gpt.train.make_model(gpt.huggingface.TransformersConfig(**settings))


def test_where_transformers_is_missing_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-pfo\[examples\]'"):
        gpt.train.make_model(gpt.huggingface.TransformersConfig())

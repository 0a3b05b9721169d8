"""What training changes in objects that are not ours, and what is left of it: one process."""

import json
import sys
from pathlib import Path

import lightning as L
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BaseFinetuning
from plain_module import PlainModule, make_loaders

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.attributes import changed, own_functions, warning_filters


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        pass

    def finetune_function(self, pl_module, epoch, optimizer):
        pass


class Look(L.Callback):
    def on_train_batch_end(self, trainer, *args):
        self.changed = changed(before, look())
        self.filters, self.callbacks = warning_filters(), len(trainer.callbacks)
        self.example = module.example_input_array


def look():
    return own_functions(
        finetuning=BaseFinetuning,
        module=module,
        model=module.model,
        layer=module.model[0],
        metric=module.train_f1,
        metrics=torchmetrics.Metric,
        plugin=trainer.precision_plugin,
        signals=trainer._signal_connector,
        epoch=trainer.fit_loop.epoch_loop,
        fit=trainer.fit_loop,
        validation=trainer.fit_loop.epoch_loop.val_loop,
        validated=trainer.fit_loop.epoch_loop.val_loop.batch_progress,
        predict=trainer.predict_loop,
        connector=trainer._logger_connector,
        checkpoints=trainer._checkpoint_connector,
    )


# new in Lightning 2.6
AVERAGES = [callbacks.EMAWeightAveraging()] if hasattr(callbacks, "EMAWeightAveraging") else []
module = PlainModule(metrics=True)
module.example_input_array = example = make_loaders()[0].dataset.tensors[0]
callback = Look()
trainer = L.Trainer(
    accelerator="cpu",
    devices=1,
    strategy=PfoPipelineStrategy(num_microbatches=2, activation_checkpointing=True),
    max_steps=2,
    callbacks=[callback, Unfreeze(), *AVERAGES],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
before, filters, num_callbacks = look(), warning_filters(), len(trainer.callbacks)
results = []
for _ in range(2):
    trainer.fit(module, *make_loaders())
    trainer.fit_loop.epoch_loop.max_steps += 2
    results.append(
        {
            "while training": callback.changed,
            "after": changed(before, look()),
            "filters while training": len(callback.filters) - len(filters),
            "filters after": warning_filters() == filters,
            "callbacks while training": callback.callbacks - num_callbacks,
            "callbacks after": len(trainer.callbacks) - num_callbacks,
            "example": [callback.example is None, module.example_input_array is example],
        }
    )
Path(sys.argv[1], "results.json").write_text(json.dumps(results))

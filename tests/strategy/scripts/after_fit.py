"""After `fit`, a rank fails alone in the script; the other calls what all call together. Usage: after_fit.py FOLDER.

Two processes, of which the second is started as users' scripts are; the first writes FOLDER/rank_0.json.
"""

import json
import sys
import time
from pathlib import Path

import lightning as L
import torch
from plain_module import PlainModule, make_loaders

from lightning_pfo.strategy import PfoPipelineStrategy

FOLDER = Path(sys.argv[1])

if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PfoPipelineStrategy(num_microbatches=4, check_loss=False),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = PlainModule()
    trainer.fit(module, *make_loaders(num_samples=24, batch_size=12))
    strategy = trainer.strategy

    def whole_parameters():
        with strategy.whole_parameters(module):
            pass

    trainer.save_checkpoint(FOLDER / "both.ckpt")
    whole_parameters()
    whole = strategy.gather_module()
    if trainer.global_rank == 1:
        raise ValueError("the second rank's own mistake")
    assert not any(parameter.is_meta for parameter in whole.parameters())
    calls = {
        "barrier": strategy.barrier,
        "save_checkpoint": lambda: trainer.save_checkpoint(FOLDER / "alone.ckpt"),
        "gather_module": strategy.gather_module,
        "broadcast": lambda: strategy.broadcast(3),
        "whole_parameters": whole_parameters,
        "grad_norm": strategy.grad_norm,
        "reduce_boolean_decision": lambda: strategy.reduce_boolean_decision(True),
        "optimizer_state": lambda: strategy.optimizer_state(trainer.optimizers[0]),
        "load_checkpoint": lambda: strategy.load_checkpoint(FOLDER / "both.ckpt"),
    }
    seen = {}
    for name, call in calls.items():
        begin = time.monotonic()
        try:
            call()
            seen[name] = "has come to an end"
        except Exception as error:
            seen[name] = f"{type(error).__name__}: {error}"
        assert time.monotonic() - begin < 30
    # a single replica has nothing to do there
    seen["reduce"] = float(strategy.reduce(torch.tensor(3.0)))
    (FOLDER / "rank_0.json").write_text(json.dumps(seen))

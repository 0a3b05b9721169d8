"""Plans for any pipeline loop: asks our server, sets clocks, measures when asked; neither Lightning nor our strategy.

`PipelineFrequencyOptimizer` has the callback shape of Zeus's, so that a framework that calls that one can call this.
Read in this order:

1. `optimizer`: what a training loop calls;
2. `plan_follower`: asks for plans beside the training, and goes on without a server; `pace`: when, and how many steps
   ahead; `server_link`: HTTP; `answers`: what form an answer must have;
3. `cursor`: the next clock of a plan, for a loop that may do something else; `reports`: what is measured under it;
4. `loop_source`: the loop as listeners know a pipeline.

It stands on `device` and `listeners` (guarded clocks, requests tied to the GPU's progress, meters), because that is
what a plan needs on any loop, and on nothing of the server but its protocol: both can be of different releases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pfo.client.optimizer import PipelineFrequencyOptimizer

__all__ = ["PipelineFrequencyOptimizer"]


def __getattr__(name: str) -> Any:
    if name == "PipelineFrequencyOptimizer":  # torch is imported with it
        from lightning_pfo.client.optimizer import PipelineFrequencyOptimizer

        return PipelineFrequencyOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

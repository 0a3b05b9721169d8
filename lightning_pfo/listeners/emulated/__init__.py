"""Emulated GPUs under the ranks of a pipeline.

Read in this order:

1. `emulation`: each instruction occupies this rank's GPU for its modelled time;
2. `virtual_pipeline`: virtual time passes on all ranks as if their GPUs waited for each other;
3. `moments`: what ranks tell each other about it.
"""

"""Real GPUs, through whoever drives them.

Read in this order:

1. `visible_gpus`: which GPUs CUDA_VISIBLE_DEVICES leaves;
2. `nvml_library`: NVML's functions and errors, the only importer of pynvml; `nvml`: NVIDIA's GPUs through it;
   `nvml_questions`: what not every driver tells;
3. `zeus`: AMD's, and NVIDIA's with the zeusd daemon, through the zeus package;
4. `dry_run`: any GPU, with everything but changes of its clocks.

All lock clocks under a lease (`safety.leased_gpu`).
"""

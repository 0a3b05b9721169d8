"""What a step of the user does, and running one stage of it.

Read `tracked` first: tensors that are followed while the step runs. `trace` notes what the step does (`events`) without
computing, with the help of `outline`, `remembered` and `noticing`; `program` divides that over stages; `stage_run` runs
a stage. `samples` says up to where samples are computed one by one. `follow` patches the modules; `functions` are those
of torch that need no values.
"""

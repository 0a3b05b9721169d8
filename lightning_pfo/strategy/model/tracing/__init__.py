"""What a step of the user does, and running one stage of it.

Read `tracked` first: tensors that are followed while the step runs. `trace` notes what the step does (`events`) without
computing, with the help of `differentiating` and rooms `forms`, `noticing`. Room `dividing` says where the step can be
cut and divides it over stages; `stage_run` runs a stage, which ends as `ends` says. `placeholders` are the parameters
of other ranks; `trees` takes containers and objects apart; `functions` are those of torch that need no values.
"""

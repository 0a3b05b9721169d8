"""What a step of the user does, and running one stage of it.

Read `tracked` first: tensors that are followed while the step runs. `trace` notes what the step does (`events`) without
computing, with the help of `forms`, `noticing` and `differentiating`. `cutting` says where the step can be cut,
`program` divides it over stages, and says up to where samples are computed one by one; `stage_run` runs a stage.
`placeholders` are the parameters of other ranks; `trees` takes containers and objects apart; `functions` are those of
torch that need no values.
"""

"""What a step of the user does, and running one stage of it.

Read `tracked` first: tensors that are followed while the step runs. `trace` notes what the step does (`events`) without
computing, with the help of `outline`, `remembered` and `noticing`; `varying` knows which sizes depend on values.
`program` divides that over stages, and says up to where samples are computed one by one; `stage_run` runs a stage.
`placeholders` are the parameters of other ranks; `trees` takes containers and objects apart; `functions` are those of
torch that need no values.
"""

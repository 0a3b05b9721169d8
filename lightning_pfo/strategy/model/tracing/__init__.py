"""What a step of the user does, and running one stage of it.

Read `tracked` first: tensors that are followed while the step runs. `trace` notes what the step does without computing,
with the help of `outline`; `program` divides that over stages; `stage_run` runs a stage. `follow` patches the modules.
"""

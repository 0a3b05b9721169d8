"""Orders of instructions by rank, generated from integers; one family of schedules per module.

Each function maps (ranks, microbatches, ...) to `Orders` and knows nothing else; `core.pipeline_schedule` gives them
names, wraps them into a `PipelineSchedule` and checks them.
"""

"""How much memory training takes on each rank, before it takes it.

`substitutes` puts tensors without values in the place of a module's. With them `trial` runs one microbatch on each
stage of the rank, and `optimizer_trial` steps of the optimizer, and both count what lives. `timeline` adds that up in
the order of the schedule, `forecast` puts it together with what else is there, and `report` shows it.
"""

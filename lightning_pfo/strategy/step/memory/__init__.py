"""How much memory training takes on each rank, before it takes it.

`substitutes` puts tensors without values in the place of a module's. With them `trial` runs one microbatch on each
stage of the rank, `leavings` puts together what they return and leave behind, and `optimizer_trial` takes steps of the
optimizer: all count what lives (`costs`). `timeline` adds that up in the order of the schedule, `forecast` puts it
together with what else is there, and `report` shows it.
"""

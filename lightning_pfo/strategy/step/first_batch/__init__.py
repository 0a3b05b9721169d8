"""What is looked at on the first batches: do microbatches come to what the batch comes to on one device?

`comparison` has a `rehearsal` run the step both ways; `differences` says what differs by more than rounding explains,
and what follows. `states` looks at what the first batch leaves for the second, `news` at what later ones do anew.
`not_a_number` refuses to train on a loss that is NaN; `sizes` tells of steps that fail because microbatches are smaller
than their batch. `known_rules` keeps what is learned of values that steps leave.
"""

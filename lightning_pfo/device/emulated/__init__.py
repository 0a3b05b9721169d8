"""A GPU that is only modelled, for machines that have none.

Read in this order:

1. `physics`: time and power at each clock;
2. `work`: from a stage's counted operations and bytes to seconds;
3. `gpu`: the GPU itself, which occupies its caller for as long as an instruction would take;
4. `time`: where it takes its time from.
"""

"""A GPU that is only modelled, for machines that have none.

Read in this order:

1. `physics`: time and power at each clock;
2. `work`: from a stage's counted operations and bytes to seconds;
3. `time`: virtual time, or the host's;
4. `gpu`: the GPU itself, for which an instruction takes its modelled time;
5. `cluster`: how several of them are connected.
"""

"""No GPU stays locked at a low clock, however a process ends.

Read in this order:

1. `guard`: ends that a process can see coming: exit, exceptions, SIGINT, SIGTERM, SIGHUP, inside a call of C too;
2. `lease`: files that say which process has changed which GPU; `folder`: where they are, safe from other users;
   `process_id`: whether that process still lives;
3. `claim`: one process at a time sets a GPU's clocks, and what a dead one left is undone; `others`: who else computes
   on a GPU;
4. `watchdog`: the process that does so within seconds of a SIGKILL; `watching`: the trainer's end of it;
5. `leased_gpu`: the base of real GPUs, which locks and restores under all this.

`backends` are built on `leased_gpu`; `claim` knows them by name only, to undo what another process did through them.
"""

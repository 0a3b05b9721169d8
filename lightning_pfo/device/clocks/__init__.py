"""Setting clocks while a model trains.

Read in this order:

1. `transition`: how quickly a clock is there after it was asked for, and whether it gets there at all;
2. `controller`: sets clocks off the training thread, and restores them.
"""

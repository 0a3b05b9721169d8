"""Energy from counters that tick more slowly than instructions follow each other.

Read in this order:

1. `attribution`: who used the energy between ticks, by least squares;
2. `fits`: powers that explain the ticks, for every lag and look of a counter;
3. `looks`: what counters make of power that varies;
4. `known_looks`, `calibration`: what is known of a counter beforehand, learnt from a square wave of load;
5. `sampler`: watches a counter, and the clock, from a thread of its own; `trace`: what it has seen;
6. `reader`: the energy so far, at any moment.
"""

"""Energy from counters that tick more slowly than instructions follow each other.

Read in this order:

1. `attribution`: who used the energy between ticks, by least squares;
2. `looks`: what counters make of power that varies;
3. `sampler`: watches a counter, and the clock, from a thread of its own;
4. `reader`: the energy so far, at any moment.
"""

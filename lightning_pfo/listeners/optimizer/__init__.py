"""One run that optimises itself: it measures, plans, applies and verifies while it trains.

Read in this order:

1. `run`: what a training loop opens and closes; `settings`: what it can be told; `states`: what happens in it;
2. `beginning`: what is known before; `memory`: what is kept; `ledger`: what iterations took;
3. `measuring`: clocks measured inside useful iterations, `probe` by probe;
4. `choosing`: what follows from measurements: where the plan is most uncertain, and whether it is good enough;
5. `verifying`: the plan and the top clocks in turn, and a faster plan where it is late;
6. `following`: the plan that is wanted now; `replicas`: stragglers.

`sweep` is another run: several plans of a frontier, one after the other, against what they promise.
"""

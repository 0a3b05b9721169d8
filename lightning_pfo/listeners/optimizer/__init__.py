"""One run that optimises itself: it measures, plans, applies and verifies while it trains.

Read in this order:

1. `run`: what a training loop opens and closes; `settings`: what it can be told; `states`: what happens in it;
2. `measuring`: clocks measured inside useful iterations, `probe` by probe;
3. `choosing`: what follows from measurements: where the plan is most uncertain, and whether it is good enough;
4. `checking`: windows at the top clocks and under the plan in turn; `verification`: what they say;
5. `replicas`: stragglers; `memory`: what is kept; `ledger`: what iterations took.

`sweep` is another run: several plans of a frontier, one after the other, against what they promise.
"""

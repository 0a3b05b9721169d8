"""Jobs, their ranks and their plans: what the server knows and decides, without HTTP and without waiting.

Every call returns at once: with an answer, with a `Refusal` (a status and a sentence), or with `NotYet`, which names
what is missing. What was accepted is an event; a job is the sum of its events, so that a server that was killed goes on
where it was. Read in this order:

1. `messages`: what is told about jobs, ranks and iterations; `answers`: what is answered instead of a plan;
2. `job`: one job, as a state machine; `plan_sequence`: its plans, step by step; `wire`: plans as clients read them;
3. `registry`: many jobs, their numbers, eviction; `store`: their events in SQLite; `dump`: files as Zeus writes them;
4. `director`: who decides on plans: files that were made before, or (`online`) what the job itself measures
   (`measurements`), plans and tries (`verifying`).
"""

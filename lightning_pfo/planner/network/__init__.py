"""Activity networks: activities with precedences, options for each, and assignments of one option to every activity.

Nothing in here knows of GPUs: an activity may as well be "dig" or "pour". Read `dag` (the precedences), `options`
(times and costs of one kind of activity), `assignments` (many choices of options at once); `arrays` names types of
arrays.
"""

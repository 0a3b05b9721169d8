"""The vocabulary everybody shares; standard library only.

Read `instruction`, `schedules` (the order of instructions on each rank), `frequency_plan` (a clock for each of
them) and `events` (what a running pipeline tells) first. `errors`, `wording` and `ranges` are for messages, `files`
writes whole files or none, `paths` and `progress` are what they say; `envpipe` has rules of EnvPipe's that planning and
training share.
"""

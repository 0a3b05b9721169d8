"""What was measured: time and energy of each stage's instructions at each clock, and the power of waiting.

Read `profile` (the data), `profile_csv` (its files), `blocking_power` (what a waiting GPU draws), `switch_latency`
(how long clocks take to change), `unreached` (rows at other clocks), `denoise` (what noise
does to a profile, and an honest way to take it out).
"""

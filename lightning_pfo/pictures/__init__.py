"""Pictures of profiles, frontiers and timelines; matplotlib is loaded when one is drawn.

Read `style` (what they share), then `frontier`, `comparison`, `cluster`, `timeline` and `profile`.
"""

"""Callbacks of Lightning and of users: who looks at what a step leaves, averages weights, or unfreezes them."""

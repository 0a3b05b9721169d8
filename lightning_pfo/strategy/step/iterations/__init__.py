"""Iterations of a training step: their gradients, and several of them for steps that optimize several times."""

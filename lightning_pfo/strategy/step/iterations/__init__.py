"""Iterations of a training step: their gradients, several of them for steps that optimize several times, and again."""

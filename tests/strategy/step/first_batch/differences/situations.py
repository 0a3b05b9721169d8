"""A batch that was run by microbatches and in one piece, and has left one number."""

from types import SimpleNamespace

import torch

from lightning_pfo.strategy.step.batches.rules import merged_by
from lightning_pfo.strategy.step.first_batch.differences.pairs import Pair

PLACE = "self.best"


class ByMicrobatches:
    """A number that is added up by weights where no rule is known; `merges` says how often it was put together."""

    def __init__(self, values, weights):
        self.values, self.recorder = values, SimpleNamespace(sizes=(2,) * len(values), weights=weights)
        self.merges = 0

    def numbers(self, rules):
        self.merges += 1
        rule = rules.of(PLACE, 1.0, ask=False)
        by_rule = merged_by(rule, self.values)
        by_weights = sum(weight * value for weight, value in zip(self.recorder.weights, self.values, strict=True))
        mean = sum(self.values) / len(self.values)
        found = by_rule[0] if by_rule else mean if rule == "mean" else by_weights
        return {PLACE: torch.tensor(found, dtype=torch.float64)}

    def zeros(self):
        return set()

    def numbers_of(self, index):
        return {PLACE: torch.tensor(self.values[index], dtype=torch.float64)}


def situation(values, whole, weight=1.0):
    numbers = {PLACE: torch.tensor(whole, dtype=torch.float64)}
    of_batch = SimpleNamespace(numbers=lambda rules: dict(numbers), zeros=set)
    return [Pair(ByMicrobatches(values, (weight,) * len(values)), of_batch)]

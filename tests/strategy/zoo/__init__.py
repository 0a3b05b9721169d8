"""Models as users bring them, tiny and with random weights; `runner` trains each on one device and on a pipeline.

`case` says what a case is; `own`, `steps`, `habits`, `seen`, `vision`, `text` and `others` are the cases; `processes`
runs the ranks of a case and ends them; `runner` measures. The tests take some of the cases, benchmarks/model_zoo.py all
of them.
"""

from tests.strategy.zoo import torchvision_import  # noqa: F401, I001 (the first)
from tests.strategy.zoo import habits, others, own, seen, steps, text, vision  # noqa: F401 (they register their cases)
from tests.strategy.zoo.case import CASES, matching
from tests.strategy.zoo.runner import Outcome, Settings, measure

__all__ = ["CASES", "Outcome", "Settings", "matching", "measure"]

"""`make test` runs those variants that differ most; `PFO_TESTS=thorough make test` runs all."""

import os

THOROUGH = os.environ.get("PFO_TESTS") == "thorough"


def mostly(some, *others):
    """Variants that are always run, and others that only a thorough run adds."""
    return (*some, *others) if THOROUGH else tuple(some)

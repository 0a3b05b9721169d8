"""What runs have written as JSON, compared."""

import pytest


def check(found, expected, path):
    """Compare nested lists and dicts, numbers to 2e-5; `path` says where, in what a failure shows."""
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            check(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), (path, found)
        for index, items in enumerate(zip(found, expected, strict=True)):
            check(*items, f"{path}[{index}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=2e-5), path
    else:
        assert found == expected, path

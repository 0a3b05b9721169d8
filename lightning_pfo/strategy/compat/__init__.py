"""All that the package uses of torch although it is not public.

In each module `PRIVATE` lists the names, and what would break without each. `tests/test_compat.py` finds them in the
installed version, and finds none elsewhere. `patches` changes attributes of objects of others, and undoes it.
"""

SEEN_IN = "torch 2.6 to 2.15"

"""What objects have beside what their classes give them, to see what was changed in them."""

import warnings


def own_functions(**objects):
    """For each object, by name, the callables among its own attributes."""
    return {
        name: {key: value for key, value in vars(thing).items() if callable(value)} for name, thing in objects.items()
    }


def changed(before, after):
    """The names of objects, with those of their attributes, that are others now."""
    return sorted(
        f"{name}.{key}"
        for name in before
        for key in before[name].keys() | after[name].keys()
        if before[name].get(key) is not after[name].get(key)
    )


def warning_filters():
    return [repr(entry) for entry in warnings.filters]

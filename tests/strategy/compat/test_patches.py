import warnings

import pytest
from torch import nn

from lightning_pfo.strategy.compat.patches import Patches, unwarned


class Base:
    @staticmethod
    def of_class():
        return "class"

    def method(self):
        return "method"


def test_patches_are_set_aside_for_a_while():
    thing = Base()
    with Patches() as patches:
        patches.set(thing, "own", 1)
        patches.set(thing, "own", 2)
        patches.set(thing, "given_away", 3)
        patches.set(Base, "of_class", staticmethod(lambda: "patched"))
        thing.given_away = "by somebody else"
        with patches.set_aside():
            assert vars(thing) == {"given_away": "by somebody else"}
            assert Base.of_class() == "class"
        assert (thing.own, thing.given_away, Base.of_class()) == (2, "by somebody else", "patched")
    assert vars(thing) == {"given_away": "by somebody else"}
    assert Base.of_class() == "class"


def test_what_an_object_or_its_class_had_is_back():
    thing = Base()
    thing.own = kept = object()
    ordinary = vars(Base)["of_class"]
    with Patches() as patches:
        patches.set(thing, "method", lambda: "patched")
        patches.set(thing, "own", None)
        patches.set(thing, "own", "twice")
        patches.set(Base, "of_class", staticmethod(lambda: "patched"))
        assert (thing.method(), thing.own, Base.of_class()) == ("patched", "twice", "patched")
    assert vars(thing) == {"own": kept}
    assert thing.method() == "method"
    assert vars(Base)["of_class"] is ordinary


def test_what_somebody_else_has_set_since_stays():
    thing = Base()
    with Patches() as patches:
        patches.set(thing, "method", lambda: "patched")
        thing.method = theirs = lambda: "theirs"
    assert thing.method is theirs


def test_all_is_undone_when_something_fails_meanwhile():
    module = nn.Linear(1, 1)

    def fail():
        with Patches() as patches:
            patches.set(module, "forward", lambda x: x)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "forward" not in vars(module)


def test_a_warning_is_ignored_for_a_while_and_filters_of_others_stay():
    def heard(text):
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn(text, stacklevel=2)
        return [str(warning.message) for warning in caught]

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with unwarned(".*advice.*"):
            assert heard("some advice") == []
            assert heard("a warning") == ["a warning"]
            warnings.filterwarnings("ignore", message="theirs")
        assert heard("some advice") == ["some advice"]
        assert heard("theirs") == []


def test_what_is_said_once_is_not_said_again_after_others_were_ignored():
    def warn():
        warnings.warn("said once", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()
        warnings.simplefilter("default")
        warn()
        with unwarned(".*advice.*"):
            warn()
        warn()
    assert [str(each.message) for each in said] == ["said once"]

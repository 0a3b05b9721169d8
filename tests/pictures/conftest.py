from tests.planner.conftest import frontier, make_profile, profile

__all__ = ["frontier", "make_profile", "profile"]

"""A server that gives any training framework its plans, by the protocol of Zeus's pipeline frequency optimizer.

`lightning-pfo serve`, or `uvicorn lightning_pfo.server:app`; the extra `server` has what it needs. Read in this order:

1. `jobs`: jobs, ranks and plans as pure logic, kept in SQLite;
2. `settings`: what the server can be told; `build`: from settings to jobs that go on;
3. `web`: HTTP, the only place that imports FastAPI, uvicorn and pydantic.

Knows the planner and core. The client is `lightning_pfo.client`, which knows nothing of the server but the protocol.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "app":  # for uvicorn, which looks it up by name; not made by an import of this package
        from lightning_pfo.server.web.serve import app_from_environment

        globals()["app"] = app = app_from_environment()  # uvicorn looks twice, and the state is for one
        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

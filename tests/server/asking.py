"""Requests to an ASGI application without a network, and what the tests of routes share."""

import asyncio
import itertools
import json
from types import SimpleNamespace

from lightning_pfo.server.jobs.director import FrontierDirector
from lightning_pfo.server.jobs.registry import JobRegistry
from lightning_pfo.server.jobs.store import IN_MEMORY, JobStore
from lightning_pfo.server.web.app import make_app
from lightning_pfo.server.web.service import Service

JOB = {"job_id": "", "pp_degree": 2, "dp_degree": 1, "tp_degree": 1, "world_size": 2, "job_metadata": None}
CLOCKS_MHZ = list(range(1410, 195, -15))


def rank_body(rank, **changes):
    place = {"rank": rank, "dp_rank": 0, "pp_rank": rank, "tp_rank": 0}
    return {**place, "available_frequencies": CLOCKS_MHZ, **changes}


def server_of(director, *, wait_s=5.0, **options):
    clock = itertools.count()
    registry = JobRegistry(director, JobStore(IN_MEMORY), now=lambda: next(clock) * 1e-3)
    service = Service(registry, wait_s=wait_s)
    return SimpleNamespace(app=make_app(service, **options), service=service, registry=registry)


def frontier_server(frontier, **options):
    return server_of(FrontierDirector(frontier, "no_slowdown"), **options)


async def ask(server, method, path, body=None, *, headers=(), raw=None, chunks=1):
    """Returns status, headers and text."""
    data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    path, _, query = path.partition("?")
    size = -(-len(data) // chunks) or 1
    parts = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
    sent = [
        {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
        for number, part in enumerate(parts)
    ]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode("latin-1", "replace"), "root_path": "",
        "headers": [(b"content-type", b"application/json"), *headers], "client": ("127.0.0.1", 1), "server": None,
    }  # fmt: skip
    received = []

    async def receive():
        if sent:
            return sent.pop(0)
        return await asyncio.Event().wait()

    async def send(message):
        received.append(message)

    await server.app(scope, receive, send)
    text = b"".join(message.get("body", b"") for message in received[1:]).decode()
    return received[0]["status"], {k.decode(): v.decode() for k, v in received[0]["headers"]}, text


async def registered_job(server):
    status, _, text = await ask(server, "POST", "/register_job", JOB)
    assert status == 200
    for rank in range(2):
        assert (await ask(server, "POST", f"/register_rank/{json.loads(text)}", rank_body(rank)))[::2] == (200, "null")
    return json.loads(text)

"""Random and mutated requests: each is answered, and none as a bug. benchmarks/serving.py sends more of them."""

import asyncio

from tests.server.asking import frontier_server
from tests.server.fuzzing import fuzz


def test_nothing_that_is_sent_is_answered_as_a_bug(frontier):
    server = frontier_server(frontier, max_body_bytes=20_000, wait_s=0.001)
    counts = asyncio.run(fuzz(server, 1000, seed=0))
    assert {200, 404, 409, 422} <= counts.keys() <= {200, 204, 400, 404, 405, 408, 409, 410, 413, 422, 503}
    assert len(server.registry.jobs) <= 1000
    assert server.service.num_waiting == 0

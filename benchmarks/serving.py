"""What a server of plans bears: many ranks at once, and requests that nobody should send.

    python benchmarks/serving.py load [--url http://127.0.0.1:7787] [--jobs 16] [--ranks 64] [--gets 4]
    python benchmarks/serving.py fuzz [--requests 100000] [--seed 1]

`load` starts a server of its own with a plan for `--ranks` stages, unless a URL says where one is: of ours, or of
Zeus's, with `--gets 0`, as that one answers each rank once. All ranks of all jobs register and fetch their plan as
Zeus's client does, each over a connection of its own, then ask again one by one. `fuzz` sends random and mutated
requests to the routes within this process: any exception or status 500 ends it. Both print one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_pfo.core.frequency_plan import uniform_plan
from lightning_pfo.core.schedules.registry import one_f_one_b
from lightning_pfo.planner.frontier.zeus_files import zeus_text

CLOCKS_MHZ = list(range(1410, 195, -15))


def main(arguments: list[str]) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["load", "fuzz"])
    parser.add_argument("--url", default="")
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--gets", type=int, default=4)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    print(json.dumps(fuzz(given) if given.what == "fuzz" else load(given)))
    return 0


def load(given: argparse.Namespace) -> dict[str, Any]:
    """Times until all ranks have their plans, and of single requests."""
    with own_server(given.ranks) if not given.url else there(given.url) as url:
        return asyncio.run(many_ranks(url, given.jobs, given.ranks, given.gets))


@contextmanager
def there(url: str) -> Iterator[str]:
    """A server that runs already."""
    yield url


@contextmanager
def own_server(num_stages: int) -> Iterator[str]:
    """A server with a plan for so many stages."""
    with tempfile.TemporaryDirectory() as folder:
        schedule = one_f_one_b(num_stages, num_stages)
        plan = Path(folder) / "plan.py"
        plan.write_text(zeus_text(uniform_plan(schedule, [1410] * num_stages), 0))
        settings = [f"solution_path={plan}", "port=0", f"state={folder}/state.sqlite"]
        command = [sys.executable, "-m", "lightning_pfo", "serve", *settings]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
            assert process.stderr is not None
            found = re.search(r"at (http://\S+);", process.stderr.readline())
            assert found
            try:
                yield found[1]
            finally:
                process.terminate()


async def many_ranks(url: str, num_jobs: int, num_ranks: int, num_gets: int) -> dict[str, Any]:
    """All jobs at once, then single requests one by one."""
    began_s = time.perf_counter()
    jobs = await asyncio.gather(*(train(url, num_ranks, number) for number in range(num_jobs)))
    all_s = time.perf_counter() - began_s
    alone_s = []
    for number in range(num_gets * len(jobs)):
        asked_s = time.perf_counter()
        await ask(url, "GET", f"/schedule/{jobs[number % len(jobs)]}?rank={number % num_ranks}")
        alone_s.append(time.perf_counter() - asked_s)
    alone_s.sort()
    result = {"jobs": num_jobs, "ranks": num_jobs * num_ranks, "all_have_plans_s": round(all_s, 3)}
    if alone_s:
        result["get_median_ms"] = round(1e3 * alone_s[len(alone_s) // 2], 2)
        result["get_p99_ms"] = round(1e3 * alone_s[int(0.99 * (len(alone_s) - 1))], 2)
    return result


async def train(url: str, num_ranks: int, number: int) -> str:
    """One job, as Zeus's clients begin it; returns its name."""
    metadata = {"job_metadata": str(number)}  # Zeus's server takes two jobs of one second for one
    degrees = {**metadata, "pp_degree": num_ranks, "dp_degree": 1, "tp_degree": 1, "world_size": num_ranks}
    job_id: str = await ask(url, "POST", "/register_job", degrees)

    async def begin(rank: int) -> None:
        place = {"rank": rank, "dp_rank": 0, "pp_rank": rank, "tp_rank": 0, "available_frequencies": CLOCKS_MHZ}
        await ask(url, "POST", f"/register_rank/{job_id}", place)
        plan = await ask(url, "GET", f"/schedule/{job_id}?rank={rank}")
        assert (plan["rank"], len(plan["frequencies"])) == (rank, 2 * num_ranks)

    await asyncio.gather(*(begin(rank) for rank in range(num_ranks)))
    return job_id


async def ask(url: str, method: str, path: str, body: Any = None) -> Any:
    """One request over a connection of its own."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read(-1)
    writer.close()
    top, _, text = answer.partition(b"\r\n\r\n")
    assert top.split()[1] == b"200", answer
    return json.loads(text)


def fuzz(given: argparse.Namespace) -> dict[str, Any]:
    """Statuses of all that was sent, and how much memory grew in the second half."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.server.asking import frontier_server
    from tests.server.fuzzing import fuzz as send
    from tests.server.small_frontier import small_frontier

    server = frontier_server(small_frontier(), max_body_bytes=20_000, wait_s=0.001)

    async def halves() -> list[tuple[dict[int, int], int]]:
        results = []
        for half in range(2):
            counts = await send(server, given.requests // 2, given.seed + half)
            results.append((counts, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
        return results

    began_s = time.perf_counter()
    (first, first_kb), (second, second_kb) = asyncio.run(halves())
    statuses = {status: first.get(status, 0) + second.get(status, 0) for status in sorted({*first, *second})}
    return {
        "requests": sum(statuses.values()),
        "statuses": statuses,
        "jobs_left": len(server.registry.jobs),
        "peak_mb_after_half": round(first_kb / 1024, 1),
        "peak_mb": round(second_kb / 1024, 1),
        "seconds": round(time.perf_counter() - began_s, 1),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

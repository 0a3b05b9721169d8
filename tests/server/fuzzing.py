"""Requests that nobody should send."""

import json
import random
from collections import Counter

from tests.server.asking import JOB, ask, rank_body

RESULT = {"rank": 0, "iter_time": [1.0], "iter_energy": [2.0], "time_breakdown": {"forward": [[0.1]]}}
STRANGE = [
    None, True, -1, 10**30, 1e308, float("nan"), float("inf"), "", "x" * 300, "\0", "\ud800", [], {}, [[]], "7", 0.5,
    {"a": 1}, [1] * 3000, "<script>", "' OR 1=1 --", "../../etc/passwd",
]  # fmt: skip
PATHS = [
    "/register_job", "/register_rank", "/register_rank/{}", "/schedule/{}", "/result/{}", "/jobs/{}/plan", "/jobs",
    "/jobs/{}", "/jobs/{}/straggler", "/jobs/{}/operating_point", "/job/{}", "/metrics", "/", "/info", "/no/{}",
]  # fmt: skip
FITTING = {
    "/register_job": JOB,
    "/register_rank/{}": rank_body(0),
    "/result/{}": RESULT,
    "/jobs/{}/operating_point": {"select": "1.02x"},
    "/jobs/{}/straggler": {"t_prime_s": 2.0},
}
BODIES = [JOB, rank_body(0), rank_body(1), RESULT, {"select": "1.02x"}, {"t_prime_s": 2.0}]


def mutated(body, chance):
    """A body with some values replaced, keys dropped, or bytes flipped; as bytes."""
    body = dict(body)
    for key in [*body]:
        roll = chance.random()
        if roll < 0.15:
            body[key] = chance.choice(STRANGE)
        elif roll < 0.2:
            del body[key]
    data = json.dumps(body).encode()
    roll = chance.random()
    if roll < 0.1 and data:
        place = chance.randrange(len(data))
        data = data[:place] + chance.randbytes(chance.randrange(4)) + data[place + 1 :]
    elif roll < 0.13:
        data = chance.choice([b"[" * 9_000, b'{"a":' * 3_000, chance.randbytes(50), b"", b"9" * 5_000, b"\xff\xfe"])
    return data


async def fuzz(server, number, seed):
    """Send requests; returns how often each status was answered. Whatever raises is a bug."""
    chance, jobs, counts = random.Random(seed), ["no+such"], Counter()
    for _ in range(number):
        name = chance.choice(jobs[-3:] * 3 + ["%00", "\u20ac", "a" * 300, str(chance.random())])
        template = chance.choice(PATHS)
        path = template.replace("{}", name)
        methods = ["GET", "POST", "POST"] + (["DELETE", "PUT", "PATCH"] if chance.random() < 0.2 else [])
        body = FITTING.get(template) if chance.random() < 0.7 else None
        if template.startswith("/schedule") or template.endswith("/plan"):
            path += "?" + query(chance)
        headers = ()
        if chance.random() < 0.05:
            headers = [(chance.choice([b"x", b"content-length", b"authorization"]), chance.randbytes(5))]
        data = mutated(body or chance.choice(BODIES), chance)
        status, _, text = await ask(server, chance.choice(methods), path, raw=data, headers=headers)
        assert "Traceback" not in text
        counts[status] += 1
        if template == "/register_job" and status == 200:
            jobs.append(json.loads(text))
    return counts


def query(chance):
    """The query of a plan, more or less."""
    values = [0, 1, 2, -1, "x", 10**30, "", "nan", "1&rank=0"]
    keys = chance.sample(["rank", "step", "version", "ahead", "wait_s", "unknown"], chance.randrange(4))
    others = [f"{key}={chance.choice(values)}" for key in keys]
    return "&".join(["rank=0", *others] if chance.random() < 0.7 else others)

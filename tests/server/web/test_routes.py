import asyncio
import base64
import json
import re
from dataclasses import replace

import pytest

from lightning_pfo.planner import select_plan
from lightning_pfo.planner.frontier.zeus_files import zeus_text
from lightning_pfo.server.jobs.director import SolutionDirector, rows_of
from lightning_pfo.server.web import app
from tests.server.asking import JOB, ask, frontier_server, rank_body, registered_job, server_of


def expected_text(frontier, selection, rank):
    plan = select_plan(frontier, selection)
    pairs = zip(plan.schedule.orders[rank], plan.clocks_mhz[rank], strict=True)
    entries = ",".join(f'["{inst.type.profile_name}",{mhz}]' for inst, mhz in pairs)
    return f'{{"rank":{rank},"frequencies":[{entries}]}}'


def test_zeuss_four_routes_answer_as_its_clients_expect(frontier):
    async def train():
        server = frontier_server(frontier)
        status, _, text = await ask(server, "POST", "/register_job", {**JOB, "job_metadata": "a/b?c", "unknown": 1})
        job_id = json.loads(text)
        assert status == 200
        assert re.fullmatch(r"\d{4}(-\d\d){5}\+dp1\+pp2\+tp1\+Frontier\+a_b_c\+[0-9a-f]{8}", job_id)
        early = asyncio.create_task(ask(server, "GET", f"/schedule/{job_id}?rank=1"))  # before anybody has registered
        for rank in (0, 1, 0):  # a repeated registration counts once
            await asyncio.sleep(0)
            answer = await ask(server, "POST", f"/register_rank/{job_id}", rank_body(rank))
            assert answer[::2] == (200, "null")
        assert (await early)[::2] == (200, expected_text(frontier, "no_slowdown", 1))
        for _ in range(2):  # a retry gets the same
            answer = await ask(server, "GET", f"/schedule/{job_id}?rank=0")
            assert answer[::2] == (200, expected_text(frontier, "no_slowdown", 0))
        result = {"rank": 0, "iter_time": [0.2], "iter_energy": [30.0], "time_breakdown": {"forward": [[0.01, 0.01]]}}
        for _ in range(2):
            assert (await ask(server, "POST", f"/result/{job_id}", result))[::2] == (200, "null")
        waiting = asyncio.create_task(ask(server, "GET", f"/schedule/{job_id}?rank=0"))  # the next round
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await ask(server, "POST", f"/result/{job_id}", {**result, "rank": 1})
        assert (await waiting)[::2] == (200, expected_text(frontier, "no_slowdown", 0))
        return (await ask(server, "GET", "/metrics"))[2], (await ask(server, "GET", "/"))[2]

    metrics, page = asyncio.run(train())
    assert "pfo_jobs 1\n" in metrics
    assert re.search(r'pfo_job_plan_version\{job="[^"]+"\} 1\n', metrics)
    assert 'pfo_requests_total{status="200"}' in metrics
    for line in metrics.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) pfo_\w+ .+|pfo_\w+(\{\w+=\"[^\"]*\"\})? [0-9.e+-]+", line)
    assert "a_b_c" in page
    assert "2 of 2" in page


def test_the_artifacts_dialect(frontier, tmp_path):
    """Bare clocks, the job in the body, and a clock for all that a rank does."""
    plan = select_plan(frontier, "1.1x")
    path = tmp_path / "freqs_pipeline_00001.py"
    path.write_text(f"# Iteration 1\n{[list(row) for row in plan.clocks_mhz]}")
    zeus_path = tmp_path / "zeus.py"
    zeus_path.write_text(zeus_text(plan, 1))
    schedule = ["load", *["forward", "p2p", "forward", "backward", "forward", "backward", "backward"], "step"]
    row = plan.clocks_mhz[0]
    expected = [row[0], row[0], row[0], *row[1:], row[-1]]

    async def train(file):
        server = server_of(SolutionDirector(file))
        assert json.loads((await ask(server, "GET", "/info"))[2])["mode"] == "frequency"
        _, _, text = await ask(server, "POST", "/register_job", {**JOB, "framework": "Merak", "num_microbatches": 3})
        for rank in (0, 1):
            body = rank_body(rank, job_id=json.loads(text), pipe_schedule=schedule if rank == 0 else [])
            body["power_state_range"] = body.pop("available_frequencies")
            assert (await ask(server, "POST", "/register_rank", body))[0] == 200
        return [json.loads((await ask(server, "GET", f"/schedule/{json.loads(text)}?rank={r}"))[2]) for r in (0, 1)]

    for file in (path, zeus_path):
        first, second = asyncio.run(train(file))
        assert first == {"rank": 0, "power_states": expected}
        assert [mhz for _, mhz in second["frequencies"]] == list(plan.clocks_mhz[1])


@pytest.mark.parametrize(
    ("request_", "status", "says"),
    [
        (("POST", "/register_job", {**JOB, "world_size": 3}), 422, "pp_degree x dp_degree x tp_degree"),
        (("POST", "/register_job", {**JOB, "pp_degree": 0}), 422, "greater than or equal to 1"),
        (("POST", "/register_job", {**JOB, "job_id": "mine"}), 422, "the server names jobs"),
        (("POST", "/register_job", {**JOB, "pp_degree": 4, "world_size": 4}), 409, "Plan for 4 stages"),
        (("POST", "/register_rank/no+such", rank_body(0)), 404, "There is no job"),
        (("GET", "/schedule/no+such?rank=0", None), 404, "There is no job"),
        (("GET", "/schedule/JOB?rank=7", None), 404, "there is no rank 7"),
        (("GET", "/schedule/JOB?rank=x", None), 422, "valid integer"),
        (("POST", "/register_rank/JOB", rank_body(7)), 409, "between 0 and 1"),
        (("POST", "/register_rank/JOB", rank_body(0, pp_rank=1)), 409, "other values"),
        (("POST", "/result/JOB", {"rank": 5, "iter_time": [], "iter_energy": []}), 404, "there is no rank 5"),
        (("POST", "/result/JOB", {"rank": 0, "iter_time": [1.0], "iter_energy": [], "version": 9}), 409, "version 1"),
        (("POST", "/jobs/JOB/operating_point", {"select": "1.9 furlongs"}), 409, "Cannot select"),
        (("POST", "/jobs/JOB/operating_point", {"select": "0.1x"}), 409, "iteration times range from"),
        (("GET", "/nowhere", None), 404, "Not Found"),
    ],
)
def test_what_cannot_be_is_answered_with_a_sentence(frontier, request_, status, says):
    async def answer():
        server = frontier_server(frontier)
        job_id = await registered_job(server)
        method, path, body = request_
        return await ask(server, method, path.replace("JOB", job_id), body)

    found, _, text = asyncio.run(answer())
    assert found == status
    assert says in text
    assert "Traceback" not in text


def test_waiting_ends_with_who_is_missing_and_with_the_job(frontier):
    async def wait():
        server = frontier_server(frontier, wait_s=0.05)
        job_id = json.loads((await ask(server, "POST", "/register_job", JOB))[2])
        await ask(server, "POST", f"/register_rank/{job_id}", rank_body(1))
        late = await ask(server, "GET", f"/schedule/{job_id}?rank=1")
        server.service._wait_s = 60
        waiting = asyncio.create_task(ask(server, "GET", f"/schedule/{job_id}?rank=1"))
        await asyncio.sleep(0.01)
        deleted = await ask(server, "DELETE", f"/job/{job_id}")
        over = await waiting
        again = await ask(server, "DELETE", f"/job/{job_id}")
        other = json.loads((await ask(server, "POST", "/register_job", JOB))[2])
        last = asyncio.create_task(ask(server, "GET", f"/schedule/{other}?rank=0"))
        await asyncio.sleep(0.01)
        server.service.end()
        assert server.service.num_waiting == 1
        return late, deleted, over, again, await last

    late, deleted, over, again, last = asyncio.run(wait())
    assert (late[0], late[1]["retry-after"]) == (503, "5")
    assert "1 rank (0) not registered" in late[2]
    assert deleted[0] == 200
    assert (over[0], again[0]) == (410, 410)
    assert "it was deleted" in over[2]
    assert last[0] == 503
    assert "The server ends" in last[2]


def test_operating_points_and_stragglers_take_effect_at_one_step(frontier):
    async def train():
        server = frontier_server(frontier)
        job_id = await registered_job(server)
        first = [
            await ask(server, "GET", f"/jobs/{job_id}/plan?rank={rank}&step={step}&ahead=3")
            for rank, step in ((0, 7), (1, 8))
        ]
        same = await ask(server, "GET", f"/jobs/{job_id}/plan?rank=0&step=8&ahead=3&version=1")
        slower = await ask(server, "POST", f"/jobs/{job_id}/operating_point", {"select": "1.1x"})
        late_s = 1.5 * frontier.baseline.iteration_time_s
        beside = await ask(server, "POST", f"/jobs/{job_id}/straggler", {"t_prime_s": late_s})
        plans = [await ask(server, "GET", f"/jobs/{job_id}/plan?rank={r}&step=9&version=1&ahead=3") for r in (0, 1)]
        alone = await ask(server, "POST", f"/jobs/{job_id}/straggler", {"t_prime_s": None})
        return first, same, slower, beside, plans, alone

    first, same, slower, beside, plans, alone = asyncio.run(train())
    assert [json.loads(text)["from_step"] for _, _, text in first] == [0, 0]
    assert [headers["unchanged-until-step"] for _, headers, _ in first] == ["10", "11"]
    assert (same[0], same[1]["unchanged-until-step"]) == (204, "11")
    assert json.loads(slower[2])["from_step"] == 12
    expected = select_plan(frontier, "1.1x")
    assert json.loads(slower[2])["iteration_energy_j"] == expected.iteration_energy_j
    least = select_plan(frontier, f"{1.5 * frontier.baseline.iteration_time_s}s")
    assert json.loads(beside[2])["iteration_energy_j"] == least.iteration_energy_j
    for rank, (_, _, text) in enumerate(plans):
        plan = json.loads(text)
        assert (plan["version"], plan["from_step"]) == (3, 12)
        assert [mhz for _, mhz in plan["frequencies"]] == list(least.clocks_mhz[rank])
    assert (json.loads(alone[2])["label"], json.loads(alone[2])["from_step"]) == ("1.1x", 13)


def test_what_a_trial_has_found_is_told(frontier):
    found = {
        "pairs": 6, "saving_percent": 9.5, "saving_interval_percent": [9.25, 9.75], "slowdown_percent": 0.125,
        "slowdown_interval_percent": None, "iteration_time_s": 0.25, "iteration_energy_j": 100.0,
    }  # fmt: skip

    async def watch():
        server = frontier_server(frontier)
        job_id = await registered_job(server)
        job, plan = server.registry.jobs[job_id], select_plan(frontier, "1.1x")
        server.registry._record(job, job.adopt(replace(rows_of(frontier, plan, "1.1x"), verified=found)))
        told = await ask(server, "GET", f"/jobs/{job_id}/plan?rank=0&step=0&version=1")
        return told[2], (await ask(server, "GET", "/metrics"))[2], (await ask(server, "GET", "/"))[2]

    told, metrics, page = asyncio.run(watch())
    assert json.loads(told)["verified"] == found
    assert re.search(r'pfo_job_measured_saving_ratio\{job="[^"]+"\} 0.095\n', metrics)
    assert re.search(r'pfo_job_measured_slowdown_ratio\{job="[^"]+"\} 0.00125\n', metrics)
    assert "verified: saves 9.50 % (9.25 to 9.75 %), takes 0.12 % longer" in page


def test_a_bug_is_answered_without_what_it_was():
    answer = asyncio.run(app._failed(None, RuntimeError("secret")))
    assert answer.status_code == 500
    assert "secret" not in answer.body.decode()


def test_a_secret_is_asked_for_before_anything_is_read(frontier):
    token = "0123456789abcdef"
    basic = base64.b64encode(f"any:{token}".encode())

    async def statuses():
        server = frontier_server(frontier, token=token, max_body_bytes=1000)
        headers = [b"", b"Bearer wrong", b"Bearer " + token.encode(), b"Basic " + basic, b"Basic !!", b"bearer"]
        found = [(await ask(server, "GET", "/jobs", headers=[(b"authorization", each)]))[0] for each in headers]
        allowed = [(b"authorization", headers[2])]
        large = b'{"a": "' + b"x" * 2000 + b'"}'
        found += [
            (await ask(server, "POST", "/register_job", raw=large, chunks=4, headers=allowed))[0],
            (await ask(server, "POST", "/register_job", raw=b"", headers=[*allowed, (b"content-length", b"2000")]))[0],
            (await ask(server, "POST", "/register_job", raw=b"", headers=[*allowed, (b"content-length", b"-1")]))[0],
        ]
        return found

    assert asyncio.run(statuses()) == [401, 401, 200, 200, 401, 401, 413, 413, 413]

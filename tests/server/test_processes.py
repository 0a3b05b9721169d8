"""What only processes show: signals, kill -9, and a state that goes on."""

import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

import lightning_pfo.server
from lightning_pfo.cli import main
from lightning_pfo.client.server_link import ServerAwayError, ServerLink, ServerRefusalError
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.server.jobs.store import JobStore
from tests.server.asking import JOB, rank_body
from tests.server.running import running_server

LONGEST_END_S = 2.0 * 5  # two seconds on a machine with nothing else to do


def test_a_killed_server_goes_on_and_an_ended_one_answers_all_that_wait(frontier_dir, tmp_path):
    """The first one serves https and asks for a token; what is told to it comes by our client's own link."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate")
    certificate, key, token = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "token"))
    made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    subprocess.run([openssl, *made, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    Path(token).write_text("0123456789abcdef\n")
    settings = (f"frontier={frontier_dir}", f"state={tmp_path}/state.sqlite")
    secure = (f"certfile={certificate}", f"keyfile={key}", f"token_file={token}")
    with running_server(*settings, "port=0", *secure) as server:
        assert server.url.startswith("https://")
        link = ServerLink(server.url, token_file=token, cafile=certificate)
        with pytest.raises(ServerRefusalError, match="401"):
            ServerLink(server.url, cafile=certificate).get("/info", {}, timeout_s=60)
        in_url = server.url.replace("https://", "https://any:0123456789abcdef@")
        assert ServerLink(in_url, cafile=certificate).get("/info", {}, timeout_s=60).status == 200
        with pytest.raises(ServerAwayError, match="certificate"):
            ServerLink(server.url, token_file=token).get("/info", {}, timeout_s=60)
        port = server.url.rpartition(":")[2]
        job_id = link.post("/register_job", JOB, timeout_s=60).content
        assert link.post(f"/register_rank/{job_id}", rank_body(1), timeout_s=60).status == 200
        with pytest.raises(ConfigurationError, match="end the server that uses it"):
            JobStore(tmp_path / "state.sqlite")
        server.end(signal.SIGKILL)  # in mid-barrier
    with running_server(*settings, f"port={port}") as server:
        answers = []
        waiting = threading.Thread(
            target=lambda: answers.append(server.ask("GET", f"/schedule/{job_id}?rank=1")), name="waiting"
        )
        waiting.start()
        assert server.ask("POST", f"/register_rank/{job_id}", rank_body(0))[0] == 200
        waiting.join(60)
        status, plan = answers[0]
        assert (status, plan["rank"], len(plan["frequencies"])) == (200, 1, 6)
        other = server.ask("POST", "/register_job", JOB)[1]
        waiting = threading.Thread(
            target=lambda: answers.append(server.ask("GET", f"/schedule/{other}?rank=0")), name="waiting"
        )
        waiting.start()
        while "pfo_requests_waiting 1" not in metrics(server):
            time.sleep(0.01)
        began_s = time.monotonic()
        said = server.end()
        assert time.monotonic() - began_s < LONGEST_END_S
        waiting.join(60)
        assert answers[1][0] == 503
        assert "The server ends" in answers[1][1]["detail"]
        assert "Traceback" not in said


def metrics(server):
    import urllib.request

    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        return response.read().decode()


def test_mistakes_are_told_before_anything_is_served(capsys):
    assert main(["serve", "frontier=here", "solution_path=there"]) == 2
    assert "Plans come from one of frontier=DIR" in capsys.readouterr().err


def test_uvicorn_finds_one_application(monkeypatch, frontier_dir, tmp_path):
    """It looks twice, and the state is for one."""
    monkeypatch.setenv("LIGHTNING_PFO_SERVE", f"frontier={frontier_dir} state={tmp_path}/state.sqlite")
    try:
        assert lightning_pfo.server.app is lightning_pfo.server.app
    finally:
        del lightning_pfo.server.app

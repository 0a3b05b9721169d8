"""Plans beside a training whose server comes and goes; the server is a list of what it answers."""

import threading
import time

import pytest

from lightning_pfo.client import plan_follower
from lightning_pfo.client.plan_follower import PlanFollower
from lightning_pfo.client.server_link import Answer, ServerAwayError, ServerLink, ServerRefusalError
from lightning_pfo.core.errors import ConfigurationError

LONGEST_S = 20.0


def plan(version, from_step=0, promised=5):
    content = {
        "version": version, "from_step": from_step, "frequencies": [["forward", 1410]], "purpose": "plan", "label": "x",
    }  # fmt: skip
    return Answer(200, {"unchanged-until-step": str(promised)}, content)


class Server:
    """Answers in turn, the last answer for ever."""

    def __init__(self, *answers):
        self.answers, self.asked, self.posted = list(answers), [], []

    def get(self, path, query, timeout_s):
        self.asked.append((path, query))
        return self.give(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])

    def post(self, path, body, timeout_s):
        self.posted.append((path, body))
        return self.give(self.answers[0]) if isinstance(self.answers[0], ServerAwayError) else None

    @staticmethod
    def give(answer):
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def follow(monkeypatch):
    monkeypatch.setattr(plan_follower, "_SHORTEST_PAUSE_S", 0.001)
    monkeypatch.setattr(plan_follower, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(plan_follower, "_IDLE_S", 0.01)
    started = []

    def make(*answers):
        follower = PlanFollower(Server(*answers), "a+b/c", 3)
        started.append(follower)
        return follower

    yield make
    for follower in started:
        follower.close()


def eventually(condition):
    deadline_s = time.monotonic() + LONGEST_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_a_first_plan_is_waited_for_while_the_server_may_come(follow):
    follower = follow(Answer(204, {}, None), plan(1))
    assert follower.wait_for_first(LONGEST_S)
    path, query = follower._link.asked[0]
    assert path == "/jobs/a+b%2Fc/plan"
    assert (query["rank"], query["step"], query["version"]) == (3, 0, 0)
    assert not follow(ServerAwayError("away")).wait_for_first(0.01)
    with pytest.raises(ServerRefusalError):
        follow(ServerRefusalError("gone")).wait_for_first(LONGEST_S)


def test_a_server_that_has_no_plan_and_does_not_wait_is_asked_now_and_then(serve):
    asked = []

    def nothing(handler):
        asked.append(handler.path)
        handler.send_response(204)
        handler.end_headers()

    assert not PlanFollower(ServerLink(serve(nothing)), "job", 0).wait_for_first(1.0)
    assert 1 <= len(asked) <= 6  # by pauses of 0.2 s


def test_the_last_plan_stays_while_the_server_is_away_and_reports_are_kept(follow, monkeypatch):
    monkeypatch.setattr(plan_follower, "_LONGEST_HOLD_S", 0.01)
    follower = follow(plan(1))
    assert follower.wait_for_first(LONGEST_S)
    follower._link.answers = [ServerAwayError("away")]
    follower.start()
    follower.report({"rank": 3})
    for step in range(1, 30):  # beyond the promise: the first such step waits for a moment, the others do not
        follower.at_step(step)
    assert follower.latest.version == 1
    eventually(lambda: len(follower._link.posted) > 2)
    follower._link.answers = [plan(2, from_step=40, promised=50)]
    eventually(lambda: follower.latest.version == 2)
    assert follower.latest.from_step == 40
    num_posted = len(follower._link.posted)
    follower.at_step(31)
    time.sleep(0.05)
    assert len(follower._link.posted) == num_posted  # sent once it was taken


def test_a_step_beyond_the_promise_waits_until_the_server_was_heard(follow):
    follower = follow(plan(1, promised=1))
    assert follower.wait_for_first(LONGEST_S)
    follower._link.answers = [plan(2, from_step=2, promised=100)]
    follower.start()
    follower.at_step(2)
    assert follower.latest.version == 2  # before the step begins


def test_a_job_that_is_over_is_asked_about_no_more(follow, caplog):
    follower = follow(plan(1), ServerRefusalError("This job is over."))
    assert follower.wait_for_first(LONGEST_S)
    follower.start()
    eventually(lambda: not follower._thread.is_alive())
    assert "training goes on under the last one" in caplog.text
    begin_s = time.monotonic()
    follower.at_step(1000)
    assert follower.latest.version == 1
    assert time.monotonic() - begin_s < LONGEST_S
    assert "pfo-plans" not in {thread.name for thread in threading.enumerate()}


def test_answers_that_are_no_plans_change_nothing(follow):
    follower = follow(Answer(200, {}, {"version": "no"}), Answer(200, {}, None), plan(1))
    assert follower.wait_for_first(LONGEST_S)


@pytest.mark.parametrize("url", ["127.0.0.1:7787", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_urls_that_cannot_be_used_are_told(url):
    with pytest.raises(ConfigurationError, match="server_url"):
        ServerLink(url)

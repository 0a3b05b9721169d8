import json

import pytest

from lightning_pfo.client.answers import ReceivedPlan, job_name, promised_step, received_plan
from lightning_pfo.client.server_link import Answer, ServerAwayError

PLAN = {
    "version": 2,
    "from_step": 7,
    "frequencies": [["forward", 1410], ["backward", 0]],
    "purpose": "scan",
    "label": "",
}
NO_WHOLE = ["2", 2.0, -1, True, None, 10**400, *json.loads("[NaN, Infinity, -Infinity, 1e999]")]


def test_answers_as_the_protocol_has_them_are_taken():
    assert job_name("2026-11-28+dp1+my_job") == "2026-11-28+dp1+my_job"
    plan = ReceivedPlan(2, 7, (("forward", 1410), ("backward", 0)), "scan", "")
    assert received_plan(Answer(200, {}, PLAN | {"verified": True})) == plan
    assert received_plan(Answer(204, {}, None)) is None
    assert [promised_step(Answer(204, {"unchanged-until-step": text}, None)) for text in ("0", "10")] == [0, 10]
    assert promised_step(Answer(200, {}, PLAN)) == 0


@pytest.mark.parametrize("name", [None, 12, [1], {"job": "x"}, "", "a\nb", "\ud800", "x" * 10_000])
def test_names_of_another_form_are_told(name):
    with pytest.raises(ServerAwayError, match=r"gets a name, a text; the server sends"):
        job_name(name)


@pytest.mark.parametrize(
    "content",
    [
        *(None, 12, "plan", [], [PLAN], {}),
        *({key: value for key, value in PLAN.items() if key != left_out} for left_out in PLAN),
        *(PLAN | {"version": value} for value in (*NO_WHOLE, 0)),
        *(PLAN | {"from_step": value} for value in NO_WHOLE),
        *(PLAN | {"frequencies": [["forward", value]]} for value in NO_WHOLE),
        *(
            PLAN | {"frequencies": value}
            for value in (None, "ab", {"forward": 1}, [1], ["ab"], [[1, 2]], [["forward"]])
        ),
        *(PLAN | {key: 1} for key in ("purpose", "label")),
    ],
)
def test_plans_of_another_form_are_told(content):
    with pytest.raises(ServerAwayError, match=r"A plan has version .* the server sends"):
        received_plan(Answer(200, {}, content))


@pytest.mark.parametrize("text", ["", "many", "-1", "1.5", "9" * 5000, "NaN"])
def test_promises_of_another_form_are_told(text):
    with pytest.raises(ServerAwayError, match="Unchanged-Until-Step is the number of a step; the server sends"):
        promised_step(Answer(200, {"unchanged-until-step": text}, PLAN))

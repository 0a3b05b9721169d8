import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.server.settings import ServerSettings, settings_from_environment


def test_zeuss_variables_are_understood():
    settings = settings_from_environment(
        {
            "ZEUS_PFO_SCHEDULER": "PointSolution3D",
            "ZEUS_PFO_SCHEDULER_ARGS": '{"solution_path": "plan.py"}',
            "ZEUS_PFO_LOG_LEVEL": "debug",
            "ZEUS_PFO_DUMP_DATA": "false",
            "ZEUS_PFO_DUMP_DIR": "dumps",
            "ZEUS_PFO_MAX_JOB_IDLE_TIME": "60",
            "UNRELATED": "x",
        }
    )
    assert (settings.solution_path, settings.dump_dir, settings.idle_s) == ("plan.py", "", 60.0)


def test_only_this_machine_is_served_unless_told_otherwise():
    assert ServerSettings().host == "127.0.0.1"


def test_settings_as_on_the_command_line(tmp_path):
    settings = settings_from_environment(
        {"LIGHTNING_PFO_SERVE": "frontier='my plans' select=1.02x max_jobs=5", "ZEUS_PFO_DUMP_DIR": str(tmp_path)}
    )
    assert (settings.frontier, settings.select, settings.max_jobs) == ("my plans", "1.02x", 5)
    assert settings.dump_dir == str(tmp_path)
    online = {"ZEUS_PFO_SCHEDULER": "InstructionProfiler", "ZEUS_PFO_SCHEDULER_ARGS": '{"num_microbatches": 8}'}
    assert settings_from_environment(online).online


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "got none"),
        ({"ZEUS_PFO_SCHEDULER": "PointSolutoin"}, "Did you mean PointSolution"),
        ({"ZEUS_PFO_SCHEDULER_ARGS": "[1]"}, "JSON object"),
        ({"ZEUS_PFO_SCHEDULER_ARGS": '{"solution_pat": "x"}'}, "Did you mean solution_path"),
        ({"ZEUS_PFO_MAX_JOB_IDLE_TIME": "a week"}, "number of seconds"),
        ({"LIGHTNING_PFO_SERVE": "frontier"}, "key=value"),
        ({"LIGHTNING_PFO_SERVE": "frontier=a port=x"}, "port is int"),
        ({"LIGHTNING_PFO_SERVE": "frontier=a port=70000"}, "port is a whole number"),
        ({"LIGHTNING_PFO_SERVE": "online=true"}, "give num_microbatches"),
        ({"LIGHTNING_PFO_SERVE": "frontier=a keyfile=b"}, "keyfile belongs to a certificate"),
        ({"LIGHTNING_PFO_SERVE": "frontier=a token_file=/no/such"}, "token_file is a file that can be read"),
        ({"LIGHTNING_PFO_SERVE": "frontier=a log_level=LOUD"}, "log_level is one of"),
        ({"LIGHTNING_PFO_SERVE": "frontier=a profiler=adaptiv"}, "profiler is one of scan, adaptive"),
        ({"LIGHTNING_PFO_SERVE": "frontier=a verify_pairs=-1"}, "verify_pairs is a whole number"),
    ],
)
def test_mistakes_are_told_with_what_would_work(environment, says):
    with pytest.raises(ConfigurationError, match="(?s).*" + says.replace("(", r"\(")):
        settings_from_environment(environment)


def test_a_token_is_one_long_word(tmp_path):
    path = tmp_path / "token"
    path.write_text("short\n")
    with pytest.raises(ConfigurationError, match="at least 16 characters"):
        ServerSettings(token_file=str(path)).token()
    path.write_text("0123456789abcdef\n")
    assert ServerSettings(token_file=str(path)).token() == "0123456789abcdef"

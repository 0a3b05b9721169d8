"""The README says what is true."""

import re

from lightning_pfo.experiment.command_line.arguments import with_selections
from tests.example_scripts import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_script_shown_is_the_script_that_runs():
    script = (ROOT / "examples" / "user_script.py").read_text().splitlines()
    shown = [line for block in blocks("python") for line in block.splitlines() if line.strip()]
    assert len(shown) > 8
    assert [line for line in shown if line not in script] == []


def test_files_and_pictures_exist():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    local = [link for link in links if not link.startswith("http")]
    assert len(local) >= 4
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_options_and_commands_exist():
    for group, option in re.findall(
        r"\b(model|gpu|plan|schedule|trainer|profiler|data)=([a-z0-9_][a-z0-9_,.]*)", README
    ):
        for name in option.rstrip(",.").split(","):
            # What is no file may be a selection, which becomes an option of Hydra's in this process.
            is_file = (ROOT / "conf" / group / f"{name}.yaml").exists()
            assert is_file or with_selections(f"{group}={name}", []) != f"{group}={name}", f"{group}={name}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(blocks("bash")), flags=re.MULTILINE):
        assert f"\n{target}:" in makefile

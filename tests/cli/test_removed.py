"""What version 0.2.0 removed says what to do instead, wherever somebody still asks for it."""

import pytest
from command_line import run

from eagle31_hf.errors import REMOVED_IN_0_2, removal

COMMANDS = [name for name in REMOVED_IN_0_2 if " " not in name and "_" not in name]
OPTIONS = [name for name in REMOVED_IN_0_2 if " --" in name]
SCHEDULES = [name.split()[1] for name in REMOVED_IN_0_2 if name.startswith("--schedule")]


@pytest.mark.parametrize("name", [*COMMANDS, *OPTIONS])
def test_a_removed_command_or_option_names_its_replacement(name):
    output = " ".join(run(*name.split(), code=2).stderr.replace("│", " ").split())
    assert " ".join(removal(name).split()) in output


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [["--schedule", "{}"], ["--schedule={}"]])
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_removed_schedule_names_its_replacement(command, options, schedule):
    output = run(command, *(option.format(schedule) for option in options), code=2).stderr.replace("│", " ")
    assert " ".join(removal(f"--schedule {schedule}").split()) in " ".join(output.split())


def test_a_name_that_never_was_is_not_called_removed():
    assert removal("train --no-such-option") is None
    assert "No such option" in run("train", "--no-such-option", code=2).stderr
    assert "went in" not in run("nonsense", code=2).stderr
    assert "'never' is not one of" in run("generate", "--schedule", "never", code=2).stderr

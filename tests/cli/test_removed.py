"""What version 0.2.0 removed says what to do instead, wherever somebody still asks for it."""

import pytest
from command_line import error_of

from eagle31_hf.errors import REMOVED_IN_0_2, removal

COMMANDS = [name for name in REMOVED_IN_0_2 if " " not in name and "_" not in name]
OPTIONS = [name for name in REMOVED_IN_0_2 if " --" in name]
SCHEDULES = [name.split()[1] for name in REMOVED_IN_0_2 if name.startswith("--schedule")]


@pytest.mark.parametrize("name", [*COMMANDS, *OPTIONS])
def test_a_removed_command_or_option_names_its_replacement(name):
    assert error_of(*name.split(), code=2) == f"error: {removal(name)}"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [["--schedule", "{}"], ["--schedule={}"]])
@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_removed_schedule_names_its_replacement(command, options, schedule):
    said = error_of(command, *(option.format(schedule) for option in options), code=2)
    assert said == f"error: {removal(f'--schedule {schedule}')}"

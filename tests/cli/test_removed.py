"""What version 0.2.0 removed says what to do instead, wherever somebody still asks for it."""

import pytest
from command_line import run

from eagle31_hf.errors import REMOVED_IN_0_2, removal

COMMANDS = [name for name in REMOVED_IN_0_2 if " " not in name and "_" not in name]
OPTIONS = [name for name in REMOVED_IN_0_2 if " --" in name]


@pytest.mark.parametrize("name", [*COMMANDS, *OPTIONS])
def test_a_removed_command_or_option_names_its_replacement(name):
    output = " ".join(run(*name.split(), code=2).stderr.replace("│", " ").split())
    assert " ".join(removal(name).split()) in output


def test_a_name_that_never_was_is_not_called_removed():
    assert removal("train --no-such-option") is None
    assert "No such option" in run("train", "--no-such-option", code=2).stderr
    assert "went in" not in run("nonsense", code=2).stderr

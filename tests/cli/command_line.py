"""The command line as a test calls it: what is printed, the exit code, and an error's one line."""

from typer.testing import CliRunner

from eagle31_hf.cli import app
from eagle31_hf.demo import drafter_path, target_path

TARGET, DRAFTER = str(target_path()), str(drafter_path())
PROMPT = "What is the weather going to be like in Portland this weekend?"


def run(*arguments, code=0, given=None):
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(app, words, input=given, env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def error_of(*arguments, code=1):
    result = run(*arguments, code=code)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, "an error is one line"
    assert lines[0].startswith("error: ")
    assert not result.stdout
    return lines[0]

"""Code is loaded only from what the user alone can write."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle31_hf.graphs.ahead.packages import make_own_folder, why_not_ours

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes of files")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a" / "b" / "graph.json"
    make_own_folder(path.parent)
    path.write_text("{}")
    path.chmod(0o600)
    return path


def test_own_files_are_ours(file: Path, tmp_path: Path) -> None:
    assert why_not_ours(file) == ""
    link = tmp_path / "link"
    link.symlink_to(file.parent)
    assert why_not_ours(link / file.name) == ""
    file.parent.chmod(0o1777)  # as /tmp: others may add files and exchange none
    assert why_not_ours(file) == ""


def open_to_a_group(file: Path) -> None:
    os.chown(file, -1, 54321)
    file.chmod(0o660)


def hide_it_behind_a_link(file: Path) -> None:
    elsewhere = file.parent.parent / "elsewhere"
    file.parent.rename(elsewhere)
    elsewhere.chmod(0o777)
    file.parent.symlink_to(elsewhere)


OPENED: dict[str, tuple[Callable[[Path], object], str]] = {
    "the file": (lambda file: file.chmod(0o666), "others may write"),
    "its folder": (lambda file: file.parent.chmod(0o777), "others may write"),
    "a folder above": (lambda file: file.parent.parent.chmod(0o707), "others may write"),
    "a group": (open_to_a_group, "others may write"),
    "another owner": (lambda file: os.chown(file.parent, 54321, -1), "another user"),
    "a link": (hide_it_behind_a_link, "others may write"),
    "no file": (lambda file: file.unlink(), "cannot be looked at"),
}


@pytest.mark.parametrize("change", OPENED)
def test_what_others_may_write_is_not(file: Path, change: str) -> None:
    if change in ("a group", "another owner") and os.getuid():
        pytest.skip("root alone gives files away")
    make, why = OPENED[change]
    make(file)
    assert why in why_not_ours(file)


def test_folders_are_made_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_own_folder(tmp_path / "new" / "deep" / "er")
    finally:
        os.umask(before)
    for part in ("new", "new/deep", "new/deep/er"):
        assert stat.S_IMODE((tmp_path / part).stat().st_mode) == 0o700

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


def open_the_file(file: Path) -> None:
    file.chmod(0o666)


def open_its_folder(file: Path) -> None:
    file.parent.chmod(0o777)


def open_a_folder_above(file: Path) -> None:
    file.parent.parent.chmod(0o707)


def open_to_a_group(file: Path) -> None:
    os.chown(file, -1, 54321)
    file.chmod(0o660)


def give_the_folder_away(file: Path) -> None:
    os.chown(file.parent, 54321, -1)


def hide_it_behind_a_link(file: Path) -> None:
    elsewhere = file.parent.parent / "elsewhere"
    file.parent.rename(elsewhere)
    elsewhere.chmod(0o777)
    file.parent.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (open_the_file, "others may write"),
        (open_its_folder, "others may write"),
        (open_a_folder_above, "others may write"),
        (open_to_a_group, "others may write"),
        (give_the_folder_away, "another user"),
        (hide_it_behind_a_link, "others may write"),
        (lambda file: file.unlink(), "cannot be looked at"),
    ],
)
def test_what_others_may_write_is_not(file: Path, change: Callable[[Path], None], why: str) -> None:
    if change in (open_to_a_group, give_the_folder_away) and os.getuid():
        pytest.skip("root alone gives files away")
    change(file)
    assert why in why_not_ours(file)


def test_folders_are_made_for_the_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_own_folder(tmp_path / "new" / "deep" / "er")
    finally:
        os.umask(before)
    for part in ("new", "new/deep", "new/deep/er"):
        assert stat.S_IMODE((tmp_path / part).stat().st_mode) == 0o700

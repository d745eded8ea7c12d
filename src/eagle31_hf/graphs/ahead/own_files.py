"""May code be loaded from here? Only from files that the user, or root, alone can write."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def why_not_ours(path: Path) -> str:
    """Why somebody else may have written what lies at `path`, links followed; empty if nobody else can have.

    The file or folder is looked at, and every folder above it: who may write one of them may exchange what is in it.
    """
    if not hasattr(os, "getuid"):  # Windows: modes say nothing, the cache folder is in the user's own profile
        return ""
    try:
        real = path.resolve(strict=True)
        whys = (_why_not(part, part.stat()) for part in (real, *real.parents))
        return next((why for why in whys if why), "")
    except OSError as error:
        return f"{path} cannot be looked at ({error.strerror})"


def make_own_folder(folder: Path) -> None:
    """Make it and those above it that are missing, writable for the user alone whatever the umask.

    Raises:
        OSError: the folder cannot be made.
    """
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            part.mkdir(mode=0o700, exist_ok=True)


def _why_not(part: Path, seen: os.stat_result) -> str:
    if seen.st_uid not in (0, os.getuid()):
        return f"{part} belongs to another user (uid {seen.st_uid})"
    # In a folder with the sticky bit, as /tmp, nobody exchanges what is another's.
    by_others = bool(seen.st_mode & stat.S_IWOTH) or (seen.st_mode & stat.S_IWGRP and not _is_private(seen.st_gid))
    if by_others and not (stat.S_ISDIR(seen.st_mode) and seen.st_mode & stat.S_ISVTX):
        return f"others may write {part} (mode {stat.S_IMODE(seen.st_mode):o}; chmod go-w {part})"
    return ""


def _is_private(group: int) -> bool:
    """Whether it is the user's own group, with nobody else in it, as many systems make one for each user."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == user.pw_name and user.pw_gid == group and set(found.gr_mem) <= {user.pw_name}

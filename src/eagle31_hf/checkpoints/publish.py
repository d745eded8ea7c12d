"""A drafter's folder to the Hub: card, config, weights and records in one commit."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub import errors as hub

from ..errors import PublishingError, first_line
from .card import CARD_FILE, RECORD_FILE, check_card, fill_card, is_filled
from .checkpoint import Checkpoint, write_checkpoint
from .config_json import TARGET_MODEL
from .files import CONFIG_FILE, WEIGHTS_FILE, get_path, read_json
from .layouts import default_format

PUBLISHED_FILES = (CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, RECORD_FILE)
"""What is uploaded of a folder, and nothing beside it: checkpoints and texts of a run stay at home."""


@dataclass(frozen=True)
class Upload:
    """What goes to `repo_id`: files of `folder` by name, and the card's text, which may not be in the folder yet."""

    repo_id: str
    folder: Path
    card: str
    files: tuple[str, ...]

    def num_bytes(self, name: str) -> int:
        """Size of one of `files`."""
        return len(self.card.encode()) if name == CARD_FILE else (self.folder / name).stat().st_size


def prepare_upload(folder: Path, repo_id: str, *, license: str | None = None) -> Upload:
    """Everything that can be refused without a network. Nothing is written.

    A `README.md` that was written or changed by hand is taken as it is; else the card is filled from
    `training_report.json`, for this repository.

    Raises:
        PublishingError: the card lacks evidence or other facts (named), or `repo_id` cannot be a Hub id.
        CheckpointError: the folder holds no drafter.
    """
    try:
        huggingface_hub.utils.validate_repo_id(repo_id)
    except hub.HFValidationError as error:
        raise PublishingError(f"got repository {repo_id!r}; wanted a Hub id, owner/name ({error})") from error
    card = _card(folder, repo_id, license)
    check_card(card)
    present = [name for name in PUBLISHED_FILES if name == CARD_FILE or (folder / name).is_file()]
    if missing := [name for name in (CONFIG_FILE, WEIGHTS_FILE) if name not in present]:
        raise PublishingError(f"{folder} lacks {', '.join(missing)}; write the drafter there with save_pretrained")
    _refuse_local_paths(folder)
    return Upload(repo_id, folder, card, tuple(present))


def _refuse_local_paths(folder: Path) -> None:
    config = read_json(folder / CONFIG_FILE)
    for place in (TARGET_MODEL, "speculators_config.verifier"):
        name = get_path(config, f"{place}.name_or_path")
        if isinstance(name, str) and Path(name).expanduser().is_absolute():
            raise PublishingError(
                f"{CONFIG_FILE} names its target by a path of this machine ({name}), which no other machine has; name "
                "its Hub id: eagle31 convert FOLDER NEW_FOLDER --target OWNER/NAME"
            )


def _card(folder: Path, repo_id: str, license: str | None) -> str:
    written = folder / CARD_FILE
    text = written.read_text(encoding="utf-8") if written.exists() else None
    if text is None or is_filled(text, folder):
        return fill_card(folder, repo_id, license=license)
    if license is not None:
        raise PublishingError(
            f"got licence {license!r}, but {written} was written by hand and is published as it is; state the licence "
            "there, or remove it"
        )
    return text


def upload(
    prepared: Upload,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload drafter",
) -> str:
    """Commit all files at once, the card written into the folder before; returns the commit's address.

    Args:
        token: with write rights; `None`: the one of `hf auth login`.
        private: of a repository that is made now.
        revision: branch; `None`: main.
        create_pr: propose the files instead of committing them.

    Raises:
        PublishingError: no token, no rights, no network, or the Hub refused; the message says what to do.
    """
    (prepared.folder / CARD_FILE).write_text(prepared.card, encoding="utf-8")
    api = huggingface_hub.HfApi(token=token, library_name="eagle31_hf")
    try:
        repo_id = api.create_repo(prepared.repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=prepared.folder,
            allow_patterns=list(prepared.files),
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )
    except Exception as error:  # which HTTP client is underneath, with errors of its own, depends on the version
        raise PublishingError(_why_refused(prepared.repo_id, error)) from error
    return str(commit.pr_url or commit.commit_url)


def publish_folder(folder: Path, repo_id: str, *, license: str | None = None, **options: Any) -> str:
    """`prepare_upload`, then `upload` with `options`; returns the commit's address."""
    return upload(prepare_upload(folder, repo_id, license=license), **options)


def publish_checkpoint(checkpoint: Checkpoint, origin: Path, repo_id: str, **options: Any) -> str:
    """The same for a checkpoint in memory, with the card and the records of `origin`, the folder it was read from."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(checkpoint, folder, format=default_format(checkpoint.config))
        for record in set(PUBLISHED_FILES) - {CONFIG_FILE, WEIGHTS_FILE}:
            if (origin / record).is_file():
                shutil.copyfile(origin / record, folder / record)
        return publish_folder(folder, repo_id, **options)


def _why_refused(repo_id: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, hub.LocalTokenNotFoundError) or status == 401:
        return (
            f"the Hub wants a token to write to {repo_id}; log in with `hf auth login`, set HF_TOKEN, or pass token= "
            "(of a role that may write)"
        )
    if status in (403, 404):
        return (
            f"this token may not write to {repo_id}; make one with write rights for {repo_id.partition('/')[0]}, or "
            "name a repository of your own"
        )
    return f"{repo_id} could not be uploaded to ({first_line(error)[:200]}); nothing was committed: try again"

"""A drafter's card, filled from its checkpoint and the record of its training, and its way to the Hub."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import huggingface_hub
from huggingface_hub import CommitOperationAdd, ModelCard, ModelCardData
from jinja2 import TemplateError

from ..errors import PublishingError, first_line
from .checkpoint import Checkpoint, inspect_checkpoint, write_checkpoint
from .config_json import TARGET_MODEL
from .files import CONFIG_FILE, WEIGHTS_FILE, get_path, read_json
from .hub import can_be_hub_id
from .layouts import default_format

CARD_FILE = "README.md"
RECORD_FILE = "training_report.json"
LIBRARY = "eagle31_hf"
DRAFT_TOKENS = 3  # what both engines' own examples draft for several users at once
_TEMPLATE = Path(__file__).with_name("card_template.md")
_TAGS = ["eagle3", "speculative-decoding", "drafter"]

_RECORD = {"target": str, "license": str, "conditions": str, "data": list, "stages": list, "recipe": dict,
           "versions": dict}  # fmt: skip
"""What a card must tell beside the checkpoint: fields of `training_report.json`, as `training.report` writes them.

`stages` holds `{"name": …, "acceptance": {category: {"rounds", "accepted", "drafted_at", "accepted_at"}}}`, with a
`curve` of `{"step", "tokens", "acceptance_length"}` where it was kept. A `command` may stand beside.
"""


def fill_card(folder: Path, repository: str, *, license: str | None = None) -> str:
    """The card of the drafter in `folder`, from its `config.json`, weights' headers and `training_report.json`.

    Args:
        repository: where it will be found: Hub id, or the folder's name.
        license: of the drafter, where the record tells none or another.

    Raises:
        PublishingError: the record lacks a licence, evidence or something else a card must tell; all of it is named.
        CheckpointError: the folder holds no drafter.
    """
    summary, record = inspect_checkpoint(folder), _read_record(folder, license)
    data = ModelCardData(
        base_model=record["target"],
        base_model_relation="adapter",
        library_name=LIBRARY,
        license=record["license"],
        pipeline_tag="text-generation",
        tags=[*_TAGS, "eagle3.1"] if summary.config.is_eagle31 else _TAGS,
    )
    try:
        kinds = [item for stage in record["stages"] for item in (stage.get("acceptance") or {}).items()]
        measured = list(dict.fromkeys(name for name, counts in kinds if counts and counts["rounds"]))
        card = ModelCard.from_template(
            data,
            template_str="---\n{{ card_data }}\n---\n\n" + _TEMPLATE.read_text(encoding="utf-8"),
            repository=repository,
            summary=summary,
            config=summary.config,
            record=record,
            categories=measured,
            commands=serving_commands(record["target"], repository, summary.format),
        )
    except (TemplateError, AttributeError, KeyError, TypeError) as error:
        raise PublishingError(
            f"{RECORD_FILE} holds stages whose acceptance or curve is none ({first_line(error)}); wanted rounds, "
            "accepted, drafted_at and accepted_at by category, and points of tokens and acceptance_length"
        ) from error
    if not measured:
        raise PublishingError(f"{folder / RECORD_FILE} lacks measured acceptance, which the card must tell; add it")
    return str(card)


def _read_record(folder: Path, license: str | None) -> dict[str, Any]:
    path = folder / RECORD_FILE
    if not path.exists():
        raise PublishingError(
            f"{folder} has neither {CARD_FILE} nor {RECORD_FILE} to fill one from, so nothing tells how the drafter "
            f"was measured; train it with eagle31 train, or write {CARD_FILE} (for an MTP head: the target it is of)"
        )
    stored = read_json(path)
    stored["license"] = license or stored.get("license")
    wrong = [name for name, kind in _RECORD.items() if not isinstance(stored.get(name), kind) or not stored[name]]
    if wrong:
        raise PublishingError(
            f"{path} lacks {', '.join(wrong)}, which the card must tell; add it there, or train or measure again "
            "(--license names a licence)"
        )
    return stored


def serving_commands(target: str, drafter: str, format: str) -> dict[str, str]:
    """By engine that reads the layout, the line that serves a target with a drafter; both are folders or Hub ids.

    vLLM's has been run (docs/formats.md).
    """
    target = shlex.quote(target)
    settings = shlex.quote(json.dumps({"method": "eagle3", "model": drafter, "num_speculative_tokens": DRAFT_TOKENS}))
    commands = {"vLLM (0.22 or later for EAGLE 3.1)": f"vllm serve {target} --speculative-config {settings}"}
    if format != "speculators":
        commands["SGLang (as its documentation says; not run by us)"] = (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {shlex.quote(drafter)} --speculative-num-steps {DRAFT_TOKENS} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFT_TOKENS + 1}"
        )
    return commands


# ---------------------------------------------------------------- publishing

PUBLISHED_FILES = (CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, RECORD_FILE)
"""What is uploaded of a folder, and nothing beside it: checkpoints and texts of a run stay at home."""


class Upload(NamedTuple):
    """What goes to `repo_id`: the card's text, and the bytes of each file of `folder` and of the card."""

    repo_id: str
    folder: Path
    card: str
    files: dict[str, int]


def prepare_upload(folder: Path, repo_id: str, *, license: str | None = None) -> Upload:
    """Everything that can be refused without a network. Nothing is written.

    A `README.md` in the folder is taken as it is; else the card is filled from `training_report.json`.

    Raises:
        PublishingError: the record lacks a licence, evidence or other facts (named), or `repo_id` cannot be a Hub id.
        CheckpointError: the folder holds no drafter.
    """
    if not can_be_hub_id(repo_id):
        raise PublishingError(f"got repository {repo_id!r}; wanted a Hub id, owner/name")
    card = _card(folder, repo_id, license)
    files = {name: (folder / name).stat().st_size for name in PUBLISHED_FILES[1:] if (folder / name).is_file()}
    if missing := [name for name in (CONFIG_FILE, WEIGHTS_FILE) if name not in files]:
        raise PublishingError(f"{folder} lacks {', '.join(missing)}; write the drafter there with save_pretrained")
    config = read_json(folder / CONFIG_FILE)
    for place in (TARGET_MODEL, "speculators_config.verifier"):
        name = get_path(config, f"{place}.name_or_path")
        if isinstance(name, str) and Path(name).expanduser().is_absolute():
            raise PublishingError(
                f"{CONFIG_FILE} names its target by a path of this machine ({name}), which no other machine has; name "
                "its Hub id: eagle31 convert FOLDER NEW_FOLDER --target OWNER/NAME (without a network, write it there "
                f"as {place}.name_or_path)"
            )
    return Upload(repo_id, folder, card, {CARD_FILE: len(card.encode())} | files)


def _card(folder: Path, repo_id: str, license: str | None) -> str:
    if not (folder / CARD_FILE).is_file():
        return fill_card(folder, repo_id, license=license)
    text = (folder / CARD_FILE).read_text(encoding="utf-8")
    named = re.search(r'Eagle31Drafter\.from_pretrained\("([^"]+)"', text)
    wrong = f"got licence {license!r}" if license is not None else ""
    if named is not None and named[1] != repo_id:
        wrong = f"got repository {repo_id!r}, where the card loads the drafter from {named[1]!r}"
    if wrong:
        raise PublishingError(
            f"{wrong}, and {folder / CARD_FILE} is published as it is; correct it there, or remove it to have a card "
            f"filled from {RECORD_FILE}"
        )
    return text


def carry_records(origin: Path, folder: Path) -> None:
    """Give a checkpoint in `folder` the card and the record of the one in `origin` that it was made from."""
    for name in (CARD_FILE, RECORD_FILE):
        if origin.resolve() != folder.resolve() and (origin / name).is_file():
            shutil.copyfile(origin / name, folder / name)


def upload(
    prepared: Upload,
    *,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Upload drafter",
) -> str:
    """Commit all files at once; returns the commit's address.

    Args:
        token: with write rights; `None`: the one of `hf auth login`.
        private: of a repository that is made now.
        revision: branch; `None`: main.
        create_pr: propose the files instead of committing them.

    Raises:
        PublishingError: no token, no rights, no network, or the Hub refused; the message says what to do.
    """
    api = huggingface_hub.HfApi(token=token, library_name=LIBRARY)
    try:
        repo_id = api.create_repo(prepared.repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        commit = api.create_commit(
            repo_id,
            [
                CommitOperationAdd(name, prepared.card.encode() if name == CARD_FILE else prepared.folder / name)
                for name in prepared.files
            ],
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
        )
    except Exception as error:  # which HTTP client is underneath, with errors of its own, depends on the version
        reason = textwrap.shorten(str(error), 300)
        raise PublishingError(
            f"{prepared.repo_id} could not be uploaded to ({reason}); nothing was committed. "
            "It takes a network and a token that may write there (`hf auth login`, HF_TOKEN or token=)"
        ) from error
    return str(commit.pr_url or commit.commit_url)


def publish_folder(folder: Path, repo_id: str, *, license: str | None = None, **options: Any) -> str:
    """`prepare_upload`, then `upload` with `options`; returns the commit's address."""
    return upload(prepare_upload(folder, repo_id, license=license), **options)


def publish_checkpoint(checkpoint: Checkpoint, origin: Path, repo_id: str, **options: Any) -> str:
    """The same for a checkpoint in memory, with the card and the records of `origin`, the folder it was read from."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(checkpoint, folder, format=default_format(checkpoint.config))
        carry_records(origin, folder)
        return publish_folder(folder, repo_id, **options)

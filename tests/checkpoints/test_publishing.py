"""Publishing: what the Hub holds afterwards, byte by byte, and what is refused before and by it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import huggingface_hub
import pytest
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from typer.testing import CliRunner

from eagle31_hf import Eagle31Drafter
from eagle31_hf.checkpoints import write_checkpoint
from eagle31_hf.checkpoints.card import fill_card, prepare_upload
from eagle31_hf.cli import app
from eagle31_hf.demo import target_path
from eagle31_hf.errors import PublishingError
from helpers import DEMO_DRAFTER

COUNTS = {"depth": 2, "rounds": 10, "accepted": 15, "drafted_at": [10, 9], "accepted_at": [8, 7]}
RECORD: dict[str, Any] = {
    "target": "owner/target",
    "license": "apache-2.0",
    "data": ["owner/conversations"],
    "recipe": {"max_steps": "7", "max_length": "512"},
    "conditions": "Greedy, chain of 2 draft tokens.",
    "versions": {"torch": "2.13.0"},
    "stages": [
        {
            "name": "stage1",
            "steps": 7,
            "loss": 1.5,
            "acceptance": {"chat": COUNTS, "empty": COUNTS | {"rounds": 0}},
            "curve": [{"step": 7, "tokens": 7168, "acceptance_length": 2.5}],
        }
    ],
    "command": "eagle31 train owner/target --prompts owner/conversations --out drafter",
    "plan": {"rows": 3},
}


class StandInHub:
    """What a repository `owner/...` holds after calls of `huggingface_hub.HfApi`, whose signatures it has.

    Attributes:
        commits: message of each to the files it holds.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.is_private: bool | None = None

    def api(self, token: str | bool | None = None, library_name: str | None = None) -> Any:
        def make(repo_id: str, *, private: bool | None, exist_ok: bool) -> Any:
            if token == "reader":
                raise ConnectionError("403 Forbidden:\nno rights")
            self.is_private = private
            return SimpleNamespace(repo_id=repo_id)

        def commit(_repo_id: str, operations: list[CommitOperationAdd], *, commit_message: str, **_: Any) -> Any:
            self.commits[commit_message] = {}
            for each in operations:
                with each.as_file() as file:
                    self.commits[commit_message][each.path_in_repo] = file.read()
            return SimpleNamespace(pr_url=None, commit_url="https://hub/owner/drafter/commit/abc")

        api = create_autospec(HfApi, instance=True)
        api.create_repo.side_effect, api.create_commit.side_effect = make, commit
        return api


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> StandInHub:
    hub = StandInHub()
    monkeypatch.setattr(huggingface_hub, "HfApi", hub.api)
    return hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trained drafter as `eagle31 train` leaves it, and what must stay at home beside it."""
    drafter = Eagle31Drafter.from_pretrained(DEMO_DRAFTER)
    out = tmp_path / "out"
    drafter.save_pretrained(out)
    (out / "training_report.json").write_text(json.dumps(RECORD))
    (out / "data").mkdir()
    for secret in ("data/texts.jsonl", "rows.jsonl", "notes.txt", "optimizer.pt"):
        (out / secret).write_text("private")
    return out


def assert_published(hub: StandInHub, folder: Path, repo_id: str = "owner/drafter") -> None:
    (files,) = hub.commits.values()  # all at once, or none
    assert set(files) == {"README.md", "config.json", "model.safetensors", "training_report.json"}
    for name in ("config.json", "model.safetensors", "training_report.json"):
        assert files[name] == (folder / name).read_bytes()
    card = files["README.md"].decode()
    assert card == fill_card(folder, repo_id)
    assert "| chat | stage1 | 2.500 | 0.80 0.78 |" in card
    assert ModelCard(card).data.library_name == "eagle31_hf"


def test_push_to_hub_uploads_card_and_report_with_the_weights(hub, folder):
    address = Eagle31Drafter.from_pretrained(folder).push_to_hub("owner/drafter", commit_message="first", private=True)
    assert_published(hub, folder)
    assert address.endswith("/owner/drafter/commit/abc")
    assert [*hub.commits] == ["first"]
    assert hub.is_private


def test_save_pretrained_with_push_uploads_what_lies_there(hub, folder):
    Eagle31Drafter.from_pretrained(folder).save_pretrained(folder, push_to_hub=True, repo_id="owner/drafter")
    assert_published(hub, folder)


def test_a_drafter_without_evidence_is_saved_and_not_uploaded(hub, tmp_path):
    drafter = Eagle31Drafter.from_pretrained(DEMO_DRAFTER)
    with pytest.raises(PublishingError, match=r"neither README\.md nor training_report\.json"):
        drafter.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="owner/drafter")
    assert Eagle31Drafter.from_pretrained(tmp_path / "saved").config.hidden_size == 256
    assert not hub.commits


def test_a_token_without_rights_is_told_so(hub, folder):
    wanted = r"owner/drafter could not be uploaded to \(403 Forbidden: no rights\); nothing .* a token that may write"
    with pytest.raises(PublishingError, match=wanted):
        Eagle31Drafter.from_pretrained(folder).push_to_hub("owner/drafter", token="reader")
    assert not hub.commits


def test_no_network_and_a_name_that_is_none(folder, monkeypatch):
    for name, value in {"ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    with pytest.raises(PublishingError, match="nothing was committed"):
        Eagle31Drafter.from_pretrained(folder).push_to_hub("owner/drafter")
    with pytest.raises(PublishingError, match="wanted a Hub id"):
        prepare_upload(folder, "not a name/at all/")


def test_the_card_tells_use_evidence_training_limits_and_licence(folder):
    card = fill_card(folder, "owner/drafter")
    wanted = ["assistant_model=eagle", "vllm serve owner/target", "sglang.launch_server --model-path owner/target",
              "| max_steps | 7 |", "| 7,168 | 2.500 |",
              "eagle31 train owner/target --prompts owner/conversations", "up to 512 tokens", "apache-2.0",
              "2.3 M parameters",
              "draft vocabulary 4096 of 8192", "each normed", "after the norm"]  # fmt: skip
    assert [text for text in wanted if text not in card] == []
    assert "empty" not in card  # nothing was measured there
    assert "{{" not in card
    data = ModelCard(card).data
    assert (data.base_model, data.license, data.base_model_relation) == ("owner/target", "apache-2.0", "adapter")
    assert "mit, for the weights" in fill_card(folder, "owner/drafter", license="mit")


def test_what_a_card_says_of_transformers_runs_as_it_stands(folder, capsys):
    report = json.loads((folder / "training_report.json").read_text()) | {"target": str(target_path())}
    (folder / "training_report.json").write_text(json.dumps(report))
    (code,) = re.findall(r"```python\n(.*?)```", fill_card(folder, str(folder)), flags=re.DOTALL)
    exec(code.replace("max_new_tokens=256", "max_new_tokens=8"), {})
    assert "tokens a pass" in capsys.readouterr().out


def test_sglang_is_not_advertised_for_a_layout_that_it_does_not_read(folder):
    write_checkpoint(Eagle31Drafter.from_pretrained(folder).to_checkpoint(), folder, format="speculators")
    card = fill_card(folder, "owner/drafter")
    assert "sglang.launch_server" not in card
    assert "vllm serve" in card


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conditions": ""}, "lacks conditions"),
        ({"stages": [], "target": None}, "lacks target, stages"),
        ({"stages": [{"name": "stage1", "acceptance": {}}]}, "lacks measured acceptance"),
        ({"stages": [{"name": "stage1", "acceptance": {"chat": {}, "code": None}}]}, "lacks measured acceptance"),
        ({"stages": [{"name": "stage1", "acceptance": {"chat": {"rounds": 3}}}]}, "whose acceptance or curve is none"),
        ({"license": None}, "lacks license,.*--license names"),
        ({"data": []}, "lacks data"),
    ],
)
def test_missing_evidence_is_named(folder, change, message):
    (folder / "training_report.json").write_text(json.dumps(RECORD | change))
    with pytest.raises(PublishingError, match=message):
        prepare_upload(folder, "owner/drafter")


def test_a_card_written_by_hand_is_published_as_it_is(folder):
    mine = fill_card(folder, "owner/drafter").replace("Greedy, chain", "On my machine: greedy, chain")
    (folder / "README.md").write_text(mine)
    assert prepare_upload(folder, "owner/drafter").card == mine
    refused = (("owner/drafter", "mit", "got licence"), ("owner/other", None, "the card loads the drafter from"))
    for repo_id, license, said in refused:
        with pytest.raises(PublishingError, match=f"{said}.*published as it is"):
            prepare_upload(folder, repo_id, license=license)


def test_card_and_record_go_along_into_another_layout(folder, tmp_path):
    (folder / "README.md").write_text("# Mine\n")
    other = tmp_path / "other"
    done = CliRunner().invoke(app, ["convert", str(folder), str(other), "--format", "speculators"])
    assert done.exit_code == 0, done.output
    assert (other / "training_report.json").read_bytes() == (folder / "training_report.json").read_bytes()
    assert (other / "README.md").read_text() == "# Mine\n"


def test_a_path_of_this_machine_is_not_published(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"target_model": {"name_or_path": "/home/me/target"}}))
    with pytest.raises(PublishingError, match=r"path of this machine.*eagle31 convert.*as target_model\.name_or_path"):
        prepare_upload(folder, "owner/drafter")


def test_the_command_shows_and_uploads_only_when_told(hub, folder):
    shown = CliRunner().invoke(app, ["push", str(folder), "owner/drafter"])
    assert shown.exit_code == 0, shown.output
    assert "add --upload" in shown.stdout
    assert "model.safetensors" in shown.stdout
    assert "texts.jsonl" not in shown.stdout
    assert not hub.commits
    done = CliRunner().invoke(app, ["push", str(folder), "owner/drafter", "--upload"])
    assert "uploaded: " in done.stdout, done.output
    assert_published(hub, folder)

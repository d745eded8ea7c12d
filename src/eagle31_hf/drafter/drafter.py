"""`Eagle31Drafter`: the network with its files, its target and its run-time settings."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, PreTrainedModel

from ..checkpoints import TARGET_MODEL, Checkpoint, default_format, read_checkpoint, write_checkpoint
from ..checkpoints.card import publish_checkpoint, publish_folder
from ..checkpoints.eagle_network import Eagle31Network
from ..checkpoints.mtp_network import MtpNetwork
from ..config import Eagle31Config, MtpConfig
from ..errors import ConfigurationError
from ..memory import MemoryPlan
from ..memory.apply_plan import apply_plan, plan_to_apply
from ..memory.ledger import DRAFTER_PRECISIONS
from ..memory.weights import SCHEMES, Quantization
from ..settings import Eagle31GenerationConfig
from ..targets.binding import TargetBinding
from ..targets.fresh_drafter import default_config
from .assistant import Assistant
from .draft_rows import with_draft_rows
from .packed_linear import bitsandbytes, pack_linears, pack_matrix, packing_of


class Eagle31Drafter(Assistant, Eagle31Network):
    """An EAGLE-3 / 3.1 drafter, to be passed as `model.generate(..., assistant_model=eagle)`.

    Attributes:
        packing: how its matrices are packed, `None` if they are not. Others are `Assistant`'s.
        metadata: `{"target_model": {"name_or_path", "architectures"}}` where its `config.json` names the target it is
            for.
    """

    generation_config: Eagle31GenerationConfig
    d2t: Tensor

    def __init__(self, config: Eagle31Config):
        super().__init__(config)
        self.metadata: dict[str, Any] = {}
        self.packing: Quantization | None = None
        self._draft_ids: Tensor | None = None

    # --- files ---------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        target: PreTrainedModel | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        quantization_config: Any = None,
        memory: MemoryPlan | Literal["auto"] | None = None,
        draft_vocab_size: int | None = None,
        **options: Any,
    ) -> Eagle31Drafter:
        """Read a published drafter from a folder or the Hub, in any layout of `docs/formats.md`.

        A target's folder that holds a multi-token-prediction (MTP) head is one, too (`docs/choosing.md`).

        Args:
            target: attach to this model at once (recommended).
            dtype: precision of the drafter; default: the target's, or without a target the checkpoint's. `"auto"`: the
                checkpoint's.
            device: default: where the target's LM head is, else CPU.
            quantization_config: `BitsAndBytesConfig` (int8, nf4, fp4) to pack attention, MLP and draft head with, also
                head rows gathered from the target (docs/memory.md).
            memory: a plan to keep to (`plan_memory`), or `"auto"` to make one for the device `target` sits on: checked
                before weights are read, it sets precision, draft length or tree, prefill chunk and cache type
                (docs/memory.md). Needs `target`.
            draft_vocab_size: rows of its target's LM head that an MTP head drafts from, the first so many; default: as
                many as pay (`draft_rows`). EAGLE drafters have a draft vocabulary of their own.
            options: `revision`, `token`, `cache_dir`, `local_files_only` as in `huggingface_hub`.

        Raises:
            CheckpointError: the checkpoint cannot be found, read or trusted.
            IncompatibleTargetError: it does not fit `target`.
            ConfigurationError: `dtype` or `quantization_config` cannot be followed, or bitsandbytes is not installed.
            MemoryPlanError: the plan was made for another target, or too little memory is free.
        """
        _chosen_dtype(dtype, torch.float32)  # a misspelt one should not cost a download
        packing = None if quantization_config is None else packing_of(quantization_config)
        plan = None if memory is None else plan_to_apply(memory, target, pretrained_model_name_or_path)
        if plan is not None and packing is None:
            packing = SCHEMES.get(DRAFTER_PRECISIONS[plan.settings.drafter_precision])
        checkpoint = read_checkpoint(pretrained_model_name_or_path, **options)
        if isinstance(checkpoint.config, MtpConfig):
            checkpoint = with_draft_rows(checkpoint, draft_vocab_size)
        elif draft_vocab_size is not None:
            raise ConfigurationError(
                f"got draft_vocab_size={draft_vocab_size} for an EAGLE drafter, whose draft vocabulary is its own "
                f"({checkpoint.config.draft_vocab_size}); leave it out"
            )
        dtype = _chosen_dtype(dtype, checkpoint.tensors["fc.weight"].dtype)
        drafter = cls.from_checkpoint(checkpoint)
        drafter.name_or_path = str(pretrained_model_name_or_path)
        if packing is not None:
            bitsandbytes()  # before anything is attached
            drafter.packing = packing
        binding = None
        if target is not None:
            binding = TargetBinding(target, drafter.config)
            dtype = dtype or binding.compute_dtype
            device = device or binding.head_device
        if packing is not None:
            pack_linears(drafter, packing, device, dtype)
        if dtype is not None or device is not None:
            drafter.to(device=device, dtype=dtype)  # type: ignore[call-arg]
        if binding is not None:
            drafter._bind(binding)
        if plan is not None:
            apply_plan(plan, drafter.generation_config)
            drafter.memory_plan = plan
        return drafter.eval()

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Eagle31Drafter:
        """Build the network around tensors already read (`read_checkpoint` has verified names and shapes)."""
        kind = MtpDrafter if isinstance(checkpoint.config, MtpConfig) else cls
        with torch.device("meta"):
            drafter = kind(checkpoint.config)
        drafter.load_canonical(checkpoint.tensors)
        drafter.metadata = checkpoint.metadata
        return drafter

    def to_checkpoint(self) -> Checkpoint:
        """The drafter as a checkpoint: published tensor names, nothing of the target's.

        Raises:
            ConfigurationError: it is packed.
        """
        if self.packing is not None:
            raise ConfigurationError(
                f"got a drafter packed in {self.packing.name} to save; only unpacked weights are written: save the "
                "drafter as loaded without quantization_config, and pack it whenever it is loaded"
            )
        return Checkpoint(self.config, self.canonical_tensors(), default_format(self.config), dict(self.metadata))

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | Path, *, format: str | None = None, **kwargs: Any
    ) -> None:
        """Write the layout that vLLM and SGLang both load, or `"speculators"` (`docs/formats.md`).

        Args:
            format: `"plain"`, `"mla"` or `"speculators"`; default: `"plain"`, or `"mla"` for latent attention.
            kwargs: `push_to_hub=True` with `repo_id` (default: the folder's name) and what `push_to_hub` takes.

        Raises:
            ConfigurationError: the layout cannot express this drafter, or it is packed.
            PublishingError: see `push_to_hub`; the folder is written all the same.
        """
        folder, push_to_hub = Path(save_directory), kwargs.pop("push_to_hub", False)
        repo_id = kwargs.pop("repo_id", folder.resolve().name)
        write_checkpoint(self.to_checkpoint(), folder, format=format or default_format(self.config))
        if push_to_hub:
            publish_folder(folder, repo_id, **kwargs)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:  # type: ignore[override]
        """Put the drafter on the Hub with its card and the records beside it; returns the commit's address.

        Card and records are those of the folder the drafter was read from. Without a `README.md` there, the card is
        filled from `training_report.json`.

        Args:
            repo_id: `owner/name`.
            options: `license` for a card that is filled, and `token`, `private`, `revision`, `create_pr`,
                `commit_message` as in transformers.

        Raises:
            PublishingError: the card lacks evidence, or the Hub refuses; the message says what is missing.
        """
        origin = Path(self.name_or_path or "unsaved").resolve()
        return publish_checkpoint(self.to_checkpoint(), origin, repo_id, **options)

    def name_target(self, name_or_path: str) -> None:
        """Write down that this drafter is for the attached target, found at `name_or_path`.

        Files saved from now on say so where each layout's loaders look; those of speculators ask for it.

        Raises:
            NotAttachedError: there is no target.
        """
        model: PreTrainedModel = self.binding.model
        architectures = list(model.config.architectures or [type(model).__name__])
        named = {"name_or_path": name_or_path, "architectures": architectures}
        self.metadata = {**self.metadata, TARGET_MODEL: named}

    # --- target --------------------------------------------------------------------------------------------------

    @classmethod
    def from_target(cls, target: PreTrainedModel, *, config: Eagle31Config | None = None, **overrides: Any) -> Any:
        """A fresh drafter for `target`, to be trained: shaped like one of its layers, EAGLE 3.1 form.

        Args:
            config: exact configuration; default: the target's own sizes, `fc_norm`, post-norm feedback.
            overrides: fields of `Eagle31Config` to set differently, e.g. `draft_vocab_size=32000`.

        Raises:
            ConfigurationError: a target of one or two layers, and no `aux_layers` given.
        """
        drafter = cls(config or default_config(target.config, **overrides))
        binding = TargetBinding(target, drafter.config)
        drafter.to(device=binding.head_device, dtype=binding.compute_dtype)  # type: ignore[call-arg]
        drafter._bind(binding)
        return drafter

    def attach(self, target: PreTrainedModel) -> Eagle31Drafter:
        """Bind to `target`: check the fit, tap its hidden states, share its embedding and head. Returns `self`.

        Raises:
            IncompatibleTargetError: what does not fit, named. The drafter stays as it was.
        """
        self._bind(TargetBinding(target, self.config))
        return self

    def _bind(self, binding: TargetBinding) -> None:
        try:
            if self.lm_head is None and self.config.has_reduced_vocabulary:
                rows = binding.head_rows(self.draft_ids).to(self.device, self.dtype)
                binding.draft_head = self._packed_rows(rows)
            self._hold(binding)
        except Exception:
            binding.close()
            raise

    def _packed_rows(self, rows: Tensor) -> Tensor | nn.Module:
        """Head rows `(Vd, H)`, packed as the other matrices are."""
        shape = (rows.shape[0], rows.shape[1])
        if self.packing is None or not self.packing.packs(shape, rows.element_size(), "lm_head"):
            return rows
        return pack_matrix(rows, self.packing)

    # --- vocabulary ----------------------------------------------------------------------------------------------

    @property
    def _knows_all(self) -> bool:
        """Whether the target, if there is one, has no more tokens than the drafter knows."""
        return self._binding is None or self._binding.vocabulary <= self.config.vocab_size

    @property
    def vocabulary(self) -> int:
        """Tokens that the target's scores are over, those added since the drafter was made included."""
        return self.config.vocab_size if self._knows_all else self.binding.vocabulary

    @property
    def draft_ids(self) -> Tensor | None:
        """Target ids `(Vd,)` of the draft head's rows, or `None` when the draft vocabulary is the target's."""
        if not self.config.has_reduced_vocabulary and self._knows_all:
            return None
        device = self.fc.weight.device
        if self._draft_ids is None or self._draft_ids.device != device:
            rows = torch.arange(self.config.draft_vocab_size, device=device)
            self._draft_ids = rows + self.d2t.to(device) if self.config.has_reduced_vocabulary else rows
        return self._draft_ids

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embedding `(B, T, H)` of target ids `(B, T)`: the drafter's own, or the target's, in the drafter's dtype.

        A token that the target has and the drafter does not know has the target's row, or zeros where its rows are of
        another width.
        """
        if self.embed_tokens is None:
            return self._embed_by_target(token_ids)
        if self._knows_all:
            return self.embed_tokens(token_ids)
        is_known = (token_ids < self.config.vocab_size)[..., None]
        own = self.embed_tokens(token_ids.clamp(max=self.config.vocab_size - 1))
        if self.config.target_hidden_size != self.config.hidden_size:
            return own * is_known
        return torch.where(is_known, own, self._embed_by_target(token_ids))

    def _embed_by_target(self, token_ids: Tensor) -> Tensor:
        return self.binding.embedding(token_ids).to(device=self.fc.weight.device, dtype=self.fc.weight.dtype)

    def draft_logits(self, normed: Tensor) -> Tensor:
        """Logits `(..., Vd)` over the draft vocabulary from post-norm hidden states `(..., H)`."""
        if self.lm_head is not None:
            return self.lm_head(normed)
        if (rows := self.binding.draft_head) is not None:
            return F.linear(normed, rows) if isinstance(rows, Tensor) else rows(normed)
        head: nn.Module = self.binding.lm_head
        logits = head(normed.to(self.binding.compute_dtype))
        return logits if self._knows_all else logits[..., : self.config.vocab_size]

    @property
    def head_weights(self) -> list[Tensor]:
        """Of the head behind `draft_logits`, its own or the target's."""
        head = self.lm_head
        if head is None:
            head = self.binding.lm_head if self.binding.draft_head is None else self.binding.draft_head
        return [head] if isinstance(head, Tensor) else list(head.parameters())

    def load_canonical(self, tensors: dict[str, Tensor], *, assign: bool = True) -> None:
        super().load_canonical(tensors, assign=assign)
        self._draft_ids = None


class MtpDrafter(MtpNetwork, Eagle31Drafter):
    """The multi-token-prediction head of a target as its drafter: what `Eagle31Drafter.from_pretrained` makes of a
    folder that holds one."""


AutoModel.register(Eagle31Config, Eagle31Drafter)


@torch.no_grad()
def copy_from_target(checkpoint: Checkpoint, target: PreTrainedModel, parts: Collection[str]) -> Checkpoint:
    """The checkpoint with `parts` (`"embedding"`, `"head"`) of its own wherever it shares them with `target`.

    The embedding `(V, H)` is what the target makes of each id, scaling included; the head has the draft vocabulary's
    rows `(Vd, H)`. Both in the drafter's dtype.

    Raises:
        IncompatibleTargetError: the drafter is not for this target.
    """
    config, tensors = copy.deepcopy(checkpoint.config), dict(checkpoint.tensors)
    dtype, binding = tensors["fc.weight"].dtype, TargetBinding(target, config)
    try:
        if "embedding" in parts and not config.own_embedding:
            ids = torch.arange(config.vocab_size, device=binding.input_device)
            tensors["embed_tokens.weight"] = binding.embedding(ids[None])[0].to("cpu", dtype)
            config.own_embedding = True
        if "head" in parts and not config.own_lm_head:
            ids = torch.arange(config.draft_vocab_size or config.vocab_size) + tensors.get("d2t", torch.tensor(0))
            rows = binding.head_rows(ids)
            tensors["lm_head.weight"], config.own_lm_head = rows.to("cpu", dtype), True
    finally:
        binding.close()
    return replace(checkpoint, config=config, tensors=tensors)


def _chosen_dtype(dtype: torch.dtype | str | None, stored: torch.dtype) -> torch.dtype | None:
    """The dtype asked for; `"auto"` is the `stored` one, `None` stays open."""
    if dtype is None or dtype == "auto":
        return stored if dtype else None
    chosen = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        raise ConfigurationError(
            f"got dtype={dtype!r}; wanted 'auto', 'bfloat16', 'float16', 'float32' or such a dtype"
        )
    return chosen

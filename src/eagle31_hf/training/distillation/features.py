"""What the drafter learns from: the target's hidden states and next-token distributions, computed now or stored.

Stored features hold, per token, the aux states the drafter reads and the state that enters the LM head (post-norm);
teacher logits are recomputed from the latter. A manifest says what they were made with, and nothing else may read them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset

from ...errors import TrainingError
from ...target.binding import TargetBinding
from ..data.disk import require_disk
from ..data.packing import pack, pack_row
from ..data.rendering import Document

MANIFEST = "manifest.json"
TOKENS_PER_SHARD = 65_536


@dataclass(frozen=True)
class TargetFeatures:
    """Of packed rows: `aux` `(B, T, A*Ht)`, `head_input` `(B, T, Ht)` and `logits` `(B, T, V)`, the target's dtype."""

    aux: Tensor
    head_input: Tensor
    logits: Tensor


@torch.no_grad()
def compute_features(binding: TargetBinding, input_ids: Tensor, position_ids: Tensor) -> TargetFeatures:
    """One target forward over packed rows `(B, T)`: positions that restart at 0 separate the documents."""
    if binding.has_states and int((position_ids == 0).sum()) > len(input_ids):
        return _features_apart(binding, input_ids, position_ids)
    with binding.masked_attention(), binding.capturing(), _head_inputs(binding) as seen:
        output = binding.model(
            input_ids=input_ids.to(binding.input_device),
            position_ids=position_ids.to(binding.input_device),
            use_cache=False,
        )
        return TargetFeatures(aux=binding.take_aux(), head_input=seen[-1], logits=output.logits)


def _features_apart(binding: TargetBinding, input_ids: Tensor, position_ids: Tensor) -> TargetFeatures:
    """The same where layers with states would read on from one document into the next: each is a row of its own.

    Those of similar length are read together; pads behind a document change nothing in it.
    """
    starts = (position_ids == 0).flatten().nonzero().flatten().tolist()
    spans = list(zip(starts, [*starts[1:], input_ids.numel()], strict=True))
    alike: dict[int, list[tuple[int, int]]] = {}
    for start, end in spans:
        alike.setdefault((end - start).bit_length(), []).append((start, end))
    parts: dict[int, tuple[Tensor, ...]] = {}  # by where a document starts
    for group in alike.values():
        rows = torch.nn.utils.rnn.pad_sequence([input_ids.flatten()[slice(*span)] for span in group], batch_first=True)
        positions = torch.arange(rows.shape[1], device=rows.device).expand(len(rows), -1)
        apart = compute_features(binding, rows, positions)
        for row, (start, end) in enumerate(group):
            states = (apart.aux, apart.head_input, apart.logits)
            parts[start] = tuple(each[row, : end - start] for each in states)
    joined = (torch.cat(column) for column in zip(*(parts[start] for start in starts), strict=True))
    return TargetFeatures(*(states.reshape(*input_ids.shape, -1) for states in joined))


@contextmanager
def _head_inputs(binding: TargetBinding) -> Iterator[list[Tensor]]:
    seen: list[Tensor] = []
    handle = binding.lm_head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))  # type: ignore[union-attr]
    try:
        yield seen
    finally:
        handle.remove()


@dataclass(frozen=True)
class FeatureManifest:
    """What stored features were made with.

    Attributes:
        target, revision, quantization: which model (quantised features differ from full ones).
        aux_layers: `hs` indices of the aux states, pre-norm.
        head_input: `"post_norm"`: the state enters the LM head as it is; never norm it again.
        dtype: of both.
        target_hidden_size, vocab_size: sizes of the target.
        documents: a fingerprint of the documents, in order.
    """

    target: str
    revision: str
    quantization: str
    aux_layers: tuple[int, ...]
    head_input: str
    dtype: str
    target_hidden_size: int
    vocab_size: int
    documents: str

    @classmethod
    def of(cls, binding: TargetBinding, documents: Sequence[Document]) -> FeatureManifest:
        """What features of this target over these documents would be made with."""
        config: Any = binding.model.config
        quantization: Any = getattr(config, "quantization_config", None)
        described = quantization.to_dict() if hasattr(quantization, "to_dict") else quantization
        return cls(
            target=binding.model.name_or_path or "",
            revision=getattr(config, "_commit_hash", None) or "",
            quantization=json.dumps(described, sort_keys=True, default=str) if described else "none",
            aux_layers=tuple(binding.aux_layers),
            head_input="post_norm",
            dtype=str(binding.compute_dtype).removeprefix("torch."),
            target_hidden_size=binding.text_config.hidden_size,
            vocab_size=binding.text_config.vocab_size,
            documents=fingerprint(documents),
        )

    @property
    def bytes_per_token(self) -> int:
        """Disk per token."""
        return (len(self.aux_layers) + 1) * self.target_hidden_size * getattr(torch, self.dtype).itemsize


def fingerprint(documents: Sequence[Document]) -> str:
    """A short digest of ids and masks, in order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(torch.tensor(document.input_ids).numpy().tobytes())
        digest.update(bytes(document.loss_mask))
        digest.update(b"|")
    return digest.hexdigest()[:16]


def store_features(
    binding: TargetBinding,
    documents: Sequence[Document],
    folder: Path,
    *,
    tokens_per_shard: int = TOKENS_PER_SHARD,
    on_tokens: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Compute and store the features of `documents`, shard by shard; continues after the shards that are complete.

    Args:
        on_tokens: called with (tokens done, tokens in all): first with those of complete shards, then by document.

    Raises:
        TrainingError: too little disk; the folder holds other features; or the target changes its logits after the LM
            head, so that they cannot be recomputed from what would be stored.
    """
    manifest = FeatureManifest.of(binding, documents)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shard(documents, tokens_per_shard)
    if (folder / MANIFEST).exists():
        check_manifest(folder, manifest)
    missing = [i for i in range(len(shards)) if not (folder / _shard_name(i)).exists()]
    tokens = sum(len(documents[number].input_ids) for i in missing for number in shards[i])
    require_disk(folder, tokens * manifest.bytes_per_token, f"storing features of {tokens:,} tokens")
    _write_atomically(folder / MANIFEST, json.dumps({**asdict(manifest), "shards": shards}).encode())
    in_all = sum(len(document.input_ids) for document in documents)
    done = in_all - tokens
    on_tokens(done, in_all)
    for index in missing:
        tensors: dict[str, Tensor] = {}
        for number in shards[index]:
            ids = torch.tensor([documents[number].input_ids])
            features = compute_features(binding, ids, torch.arange(ids.shape[1])[None])
            if not tensors:
                _require_plain_head(binding, features)
            tensors[f"{number}.aux"] = features.aux[0].cpu().contiguous()
            tensors[f"{number}.head_input"] = features.head_input[0].cpu().contiguous()
            done += ids.shape[1]
            on_tokens(done, in_all)
        temporary = folder / f".{_shard_name(index)}.tmp"
        save_file(tensors, temporary)
        os.replace(temporary, folder / _shard_name(index))


def _require_plain_head(binding: TargetBinding, features: TargetFeatures) -> None:
    logits = binding.lm_head(features.head_input)  # type: ignore[misc]
    if not torch.allclose(logits.float(), features.logits.float(), rtol=1e-2, atol=1e-2):
        raise TrainingError(
            f"{type(binding.model).__name__} changes its logits after the LM head (soft-capping, scaling), so they "
            "cannot be recomputed from stored states; train with features computed online"
        )


def _shard(documents: Sequence[Document], tokens_per_shard: int) -> list[list[int]]:
    shards: list[list[int]] = [[]]
    filled = 0
    for number, document in enumerate(documents):
        if shards[-1] and filled + len(document.input_ids) > tokens_per_shard:
            shards.append([])
            filled = 0
        shards[-1].append(number)
        filled += len(document.input_ids)
    return shards


def _shard_name(index: int) -> str:
    return f"features-{index:05d}.safetensors"


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def check_manifest(folder: Path, wanted: FeatureManifest) -> list[list[int]]:
    """Document numbers per shard of the features in `folder`, which must have been made as `wanted`.

    Raises:
        TrainingError: there are none, or they were made for another target, layer set, precision or documents; every
            field that differs is named.
    """
    try:
        content: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        shards = content.pop("shards")
        stored = FeatureManifest(**{**content, "aux_layers": tuple(content["aux_layers"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TrainingError(
            f"{folder} holds no readable feature manifest ({error}); store the features again"
        ) from error
    differing = [
        f"{name}: stored {value!r}, wanted {asdict(wanted)[name]!r}"
        for name, value in asdict(stored).items()
        if value != asdict(wanted)[name]
    ]
    if differing:
        raise TrainingError(
            f"the features in {folder} were made otherwise ({'; '.join(differing)}); remove the folder and store them "
            "again, or use what they were made for"
        )
    return shards


class StoredFeatures(Dataset):
    """Packed rows with their features: `aux (T, A*Ht)` and `head_input (T, Ht)` beside the fields of `PackedBatch`.

    Raises:
        TrainingError: the folder's features do not belong to this target and these documents, or a shard is missing.
    """

    def __init__(
        self, folder: Path, wanted: FeatureManifest, documents: Sequence[Document], *, row_length: int, seed: int
    ):
        shards = check_manifest(folder, wanted)
        missing = [_shard_name(i) for i in range(len(shards)) if not (folder / _shard_name(i)).exists()]
        if missing:
            raise TrainingError(
                f"{folder} lacks {', '.join(missing[:3])} of {len(shards)} shards; store the rest first"
            )
        self.folder, self.documents, self.row_length = folder, documents, row_length
        self._shard_of = {number: index for index, numbers in enumerate(shards) for number in numbers}
        self.rows = pack([len(document.input_ids) for document in documents], row_length, seed=seed)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        numbers = self.rows[index]
        row = pack_row([self.documents[number] for number in numbers], self.row_length)
        for field in ("aux", "head_input"):
            states = torch.cat([self._load(number, field) for number in numbers])  # (sum of lengths, width)
            row[field] = torch.nn.functional.pad(states, (0, 0, 0, self.row_length - len(states)))
        return row

    def _load(self, number: int, field: str) -> Tensor:
        # Opening maps the file; only this document's bytes are read.
        with safe_open(self.folder / _shard_name(self._shard_of[number]), framework="pt") as shard:
            return shard.get_tensor(f"{number}.{field}")

"""What the drafter learns from: the target's hidden states and next-token distributions, computed now or stored."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import Dataset

from ...errors import TrainingError
from ...target.binding import TargetBinding
from ..data.packing import PackedDocuments
from ..data.regeneration import require_disk


class TargetFeatures(NamedTuple):
    """Of packed rows: `aux` `(B, T, A*Ht)`, `head_input` `(B, T, Ht)` and `logits` `(B, T, V)`, the target's dtype."""

    aux: Tensor
    head_input: Tensor
    logits: Tensor


@torch.no_grad()
def compute_features(binding: TargetBinding, input_ids: Tensor, position_ids: Tensor) -> TargetFeatures:
    """One target forward over packed rows `(B, T)`: positions that restart at 0 separate the documents."""
    if binding.has_states and int((position_ids == 0).sum()) > len(input_ids):
        return _features_apart(binding, input_ids, position_ids)
    head: Any = binding.lm_head
    seen: list[Tensor] = []
    listening = head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    with binding.masked_attention(), binding.capturing(), listening:
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
            parts[start] = tuple(each[row, : end - start] for each in apart)
    joined = (torch.cat(column) for column in zip(*(parts[start] for start in starts), strict=True))
    return TargetFeatures(*(states.reshape(*input_ids.shape, -1) for states in joined))


class StoredFeatures(Dataset):
    """Packed rows with their features, which a file holds for each: `aux (T, A*Ht)` and `head_input (T, Ht)`.

    A file is named by its row and by what its features were made with, so none that was made otherwise is read.
    """

    def __init__(self, rows: PackedDocuments, folder: Path, binding: TargetBinding):
        self.rows, self.folder = rows, folder
        config = binding.model.config
        quantization: Any = getattr(config, "quantization_config", None)
        packing = quantization.to_dict() if hasattr(quantization, "to_dict") else quantization
        revision = getattr(config, "_commit_hash", None)
        made_with = (binding.model.name_or_path, revision, packing, binding.aux_layers, binding.compute_dtype)
        self._made_with = repr(made_with).encode()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return row | load_file(self._file(row))

    def _file(self, row: dict[str, Tensor]) -> Path:
        digest = hashlib.sha256(self._made_with)
        for field in ("input_ids", "position_ids"):
            digest.update(row[field].numpy().tobytes())
        return self.folder / f"{digest.hexdigest()[:32]}.safetensors"

    def store(self, binding: TargetBinding, indices: Sequence[int], *, on_rows: Callable[[int], None]) -> None:
        """Compute the features of these rows; `on_rows` is told first how many an earlier run had stored, then of each.

        Raises:
            TrainingError: too little disk; or the target changes its logits after the LM head, so that they cannot be
                computed again from what would be stored.
        """
        missing = [index for index in indices if not self._file(self.rows[index]).exists()]
        width = (len(binding.aux_layers) + 1) * binding.text_config.hidden_size
        needed = len(missing) * self.rows.row_length * width * binding.compute_dtype.itemsize
        require_disk(self.folder, needed, f"storing the hidden states of {len(missing):,} rows")
        self.folder.mkdir(parents=True, exist_ok=True)
        on_rows(len(indices) - len(missing))
        for index in missing:
            row = self.rows[index]
            features = compute_features(binding, row["input_ids"][None], row["position_ids"][None])
            if index == missing[0]:
                _require_plain_head(binding, features)
            temporary = self._file(row).with_suffix(f".{os.getpid()}.tmp")
            states = {"aux": features.aux[0], "head_input": features.head_input[0]}
            save_file({name: state.cpu().contiguous() for name, state in states.items()}, temporary)
            os.replace(temporary, self._file(row))
            on_rows(1)


@torch.no_grad()
def _require_plain_head(binding: TargetBinding, features: TargetFeatures) -> None:
    head: Any = binding.lm_head
    if not torch.allclose(head(features.head_input).float(), features.logits.float(), rtol=1e-2, atol=1e-2):
        raise TrainingError(
            f"{type(binding.model).__name__} changes its logits after the LM head (soft-capping, scaling), so they "
            "cannot be computed again from stored states; train without store_features"
        )

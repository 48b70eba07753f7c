"""Reads a model folder: everything is checked from the headers, then tensors or parts of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from lora_moe_jax.checkpoint import fp8, interleaved, mxfp4
from lora_moe_jax.checkpoint.folder import open_folder
from lora_moe_jax.checkpoint.names import (
    expected_tensors,
    fused_shape,
    is_interleaved,
    is_stacked,
    per_expert_names,
)
from lora_moe_jax.checkpoint.safetensors_file import FLOAT_DTYPES, SafetensorsFile
from lora_moe_jax.config.model import ModelConfig
from lora_moe_jax.errors import CheckpointError

UINT8 = ("U8",)
TIED_ROWS = 4096  # of two matrices that are compared, at a time
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.(.+)")
Files = dict[str, SafetensorsFile]
Shape = tuple[int, ...]
# Of a stacked tensor: one for each expert, of it one for each projection.
Matrix = np.ndarray | mxfp4.Mxfp4Matrix | fp8.Fp8Matrix
Pieces = list[tuple[Matrix, ...]]
_DECODER_MODULES = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")


@dataclass(frozen=True)
class TensorInfo:
    """Shape and type of a canonical tensor, before any conversion."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Checkpoint:
    """The weights of a model on disk, by canonical name (see `checkpoint.names`)."""

    def __init__(
        self,
        folder: Path,
        infos: Mapping[str, TensorInfo],
        parts: Mapping[str, Matrix | Pieces],
    ):
        """Use `open`. `parts` has a view of the file for each tensor, or one for each piece."""
        self.folder = folder
        self._infos = MappingProxyType(dict(infos))
        self._parts = parts

    @classmethod
    def open(cls, folder: str | os.PathLike, config: ModelConfig) -> Checkpoint:
        """Opens the weights in `folder` and checks them against `config`.

        No data are read, but those of a head that should be the embedding.

        Raises:
          CheckpointError: a file is missing or damaged; or a tensor is missing, unknown, there
            twice, or has a wrong shape or type.
        """
        files = open_folder(folder)
        _drop_ignored(files, config)
        infos, parts = {}, {}
        for name, shape in expected_tensors(config).items():
            find = _interleaved if is_interleaved(name, config) else _plain
            found = find(files, name, shape, folder)
            pieces = isinstance(found, list)
            dtype = _common_dtype(name, found, folder) if pieces else found.dtype
            infos[name], parts[name] = TensorInfo(shape, dtype), found
        for name, file in files.items():
            raise CheckpointError(
                "a tensor is not part of the model",
                file=file.path,
                key=name,
                expected=f"the tensors of a {config.family} model with this configuration",
                found=f"{len(files)} more, with {name}",
                hint="check that config.json belongs to these weights",
            )
        return cls(Path(folder), infos, parts)

    def names(self) -> Mapping[str, TensorInfo]:
        """Shape and type of every tensor, by canonical name, in the order of the network."""
        return self._infos

    def read(
        self,
        name: str,
        index: tuple[slice, ...] | None = None,
        dtype: np.dtype | type | None = None,
    ) -> np.ndarray:
        """Reads a tensor, or only the part of it that `index` selects.

        Args:
          name: a canonical name.
          index: a slice for each of the leading dimensions; all of the tensor if None.
          dtype: the type to convert to (rounding to nearest even); that of the file if None.

        Returns:
          A new array. Nothing else of its size is allocated.

        Raises:
          CheckpointError: there is no tensor of this name.
        """
        if name not in self._infos:
            raise CheckpointError(
                "the model has no such tensor", file=self.folder, key=name, expected="its names()"
            )
        info, parts = self._infos[name], self._parts[name]
        index = tuple(index or ()) + (slice(None),) * (len(info.shape) - len(index or ()))
        # The selected positions of each dimension.
        chosen = [range(size)[part] for part, size in zip(index, info.shape, strict=True)]
        result = np.empty([len(positions) for positions in chosen], dtype or info.dtype)
        if not isinstance(parts, list):
            _copy(result, parts[index])
            return result
        # [E, 2, I, H] from 2D pieces for gate and up; [E, H, I] from one piece per expert.
        pieces = result if result.ndim == 4 else result[:, None]
        columns = chosen[1] if result.ndim == 4 else (0,)
        for row, expert in enumerate(chosen[0]):
            for column, piece in enumerate(columns):
                _copy(pieces[row, column], parts[expert][piece][index[-2:]])
        return result


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    # "unsafe" is what narrows float32 to bfloat16; infinities from float16 are the file's own.
    with np.errstate(over="ignore"):
        np.copyto(target, source, casting="unsafe")


def _plain(files: Files, name: str, shape: Shape, folder: os.PathLike) -> Matrix | Pieces:
    """Takes a canonical tensor out of `files`, whole or in pieces."""
    if is_stacked(name) and name not in files:
        return [
            tuple(_take_matrix(files, piece, shape[-2:], folder) for piece in pieces)
            for pieces in per_expert_names(name, shape[0])
        ]
    if is_stacked(name):
        return _take(files, name, fused_shape(name, shape), folder).reshape(shape)
    return _take_matrix(files, name, shape, folder)


def _take_matrix(files: Files, name: str, shape: Shape, folder: os.PathLike) -> Matrix:
    """Takes a tensor that is in 8 bits if it has scales."""
    if name + fp8.SCALES not in files:
        return _take(files, name, shape, folder)
    weight = _take(files, name, shape, folder, fp8.WEIGHT_DTYPES)
    blocks = fp8.scales_shape(shape)
    scales = _take(files, name + fp8.SCALES, blocks, folder, fp8.SCALE_DTYPES)
    return fp8.Fp8Matrix(weight.view(np.uint8), scales.astype(np.float32))


def _interleaved(files: Files, name: str, shape: Shape, folder: os.PathLike) -> np.ndarray | Pieces:
    """The same of the experts of gpt-oss."""
    if name + interleaved.BLOCKS not in files:
        stored = interleaved.file_shape(name, shape)
        return interleaved.from_file(name, _take(files, name, stored, folder))
    experts, *rows, columns = shape
    if columns % mxfp4.NUMBERS:
        raise CheckpointError(
            "4-bit weights do not fill their blocks",
            file=folder,
            key=name + interleaved.BLOCKS,
            expected=f"rows of a multiple of {mxfp4.NUMBERS} numbers",
            found=f"{columns} in the configuration",
        )
    stored = (experts, math.prod(rows), columns // mxfp4.NUMBERS)
    scales = _take(files, name + interleaved.SCALES, stored, folder, UINT8)
    blocks = _take(files, name + interleaved.BLOCKS, (*stored, mxfp4.BYTES), folder, UINT8)
    pieces = interleaved.rows_of_pieces(name)
    return [
        tuple(mxfp4.Mxfp4Matrix(blocks[expert, its], scales[expert, its]) for its in pieces)
        for expert in range(experts)
    ]


def _take(
    files: Files,
    name: str,
    shape: Shape,
    folder: os.PathLike,
    dtypes: Collection[str] = FLOAT_DTYPES,
) -> np.ndarray:
    """Takes a tensor out of `files` as a view, once its shape and type are what they must be."""
    if name not in files:
        raise CheckpointError(
            "a tensor is missing",
            file=folder,
            key=name,
            expected=f"shape {list(shape)}",
            found="no such tensor",
            hint="check that config.json belongs to these weights",
        )
    file = files.pop(name)
    stored = file.tensors[name]
    if stored.dtype not in dtypes:
        raise CheckpointError(
            "the type of a tensor is not supported",
            file=file.path,
            key=name,
            expected=" or ".join(dtypes),
            found=stored.dtype,
            hint=f"FP8 weights need scales, {name}{fp8.SCALES}" if "F8" in stored.dtype else None,
        )
    if stored.shape != shape:
        raise CheckpointError(
            "the shape of a tensor is not that of the configuration",
            file=file.path,
            key=name,
            expected=list(shape),
            found=list(stored.shape),
            hint="check that config.json belongs to these weights",
        )
    return file.view(name)


def _common_dtype(name: str, parts: Pieces, folder: os.PathLike) -> np.dtype:
    """The one type of all pieces of a stacked tensor."""
    dtypes = {piece.dtype for pieces in parts for piece in pieces}
    if len(dtypes) > 1:
        raise CheckpointError(
            "the experts of a layer have different types",
            file=folder,
            key=name,
            expected="one type",
            found=", ".join(sorted(str(dtype) for dtype in dtypes)),
        )
    return dtypes.pop()


def _check_tied(files: dict[str, SafetensorsFile], head: str, embedding: str) -> None:
    """Raises CheckpointError if they are two matrices. Missing ones are found missing later."""
    if embedding not in files:
        return
    one, other = files[head].view(head), files[embedding].view(embedding)
    rows = range(0, len(other), TIED_ROWS)
    if one.shape != other.shape or any(
        (one[at : at + TIED_ROWS] != other[at : at + TIED_ROWS]).any() for at in rows
    ):
        raise CheckpointError(
            "the embeddings are tied, and the head is another matrix",
            file=files[head].path,
            key=head,
            expected=f"the values of {embedding}",
            found="others",
            hint="set tie_word_embeddings to false to use this head, as transformers 5 does; or "
            "remove the tensor to use the embedding, as transformers 4 does",
        )


def _drop_ignored(files: dict[str, SafetensorsFile], config: ModelConfig) -> None:
    """Drops what a checkpoint may have beyond the model.

    That is the head of a model with tied embeddings, if it is the embedding, the rotary frequencies
    that old checkpoints store, and multi-token-prediction layers, which follow the decoder layers.
    Of a head that is another matrix transformers 4 makes nothing, and transformers 5 the head. A
    further layer that is a plain decoder layer is not one of those: then the
    configuration is of a shorter model, which would load and answer nonsense.
    """
    extra: dict[int, list[tuple[str, str]]] = {}
    for name in list(files):
        layer = _LAYER.fullmatch(name)
        if name.endswith(".rotary_emb.inv_freq"):
            del files[name]
        elif name == "lm_head.weight" and config.tie_word_embeddings:
            _check_tied(files, name, "model.embed_tokens.weight")
            del files[name]
        elif layer and int(layer[1]) >= config.num_layers:
            extra.setdefault(int(layer[1]), []).append((name, layer[2]))
    for layer, names in extra.items():
        if all(module.startswith(_DECODER_MODULES) for _, module in names):
            name = names[0][0]
            raise CheckpointError(
                "there are more layers than num_hidden_layers",
                file=files[name].path,
                key=name,
                expected=f"layers 0 to {config.num_layers - 1}",
                found=f"layer {layer}",
                hint="check that config.json belongs to these weights",
            )
        for name, _ in names:
            del files[name]

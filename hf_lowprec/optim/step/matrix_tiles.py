"""Factored matrices together: tiles, whose sums over rows and columns one kernel computes, and vectors of all means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

TILE_COLUMNS = 1024
"""Columns of a tile, at most."""
TILES_TABLE = ("entry_index", "start", "tile_rows", "count", "rows", "columns", "first_row_sum", "first_column_sum")
"""Columns of `MatrixTiles.table`: the entry, the tile's first element in its tensors, the rows and columns of the tile
and of the matrix, and where the tile's sums are written."""
_SMALLEST = 1 << 12
"""Elements of the smallest matrix that is divided. A convolution has many of nine."""


class MatrixSums(NamedTuple):
    """FP64 sums over this rank's part of a parameter."""

    of_rows: Tensor
    """Of shape (..., rows, 1)."""
    of_columns: Tensor
    """Of shape (..., 1, columns)."""


class MatrixTiles:
    """The tiles of some parameters, but for those whose matrices are small.

    Attributes:
        table: int64 of shape (tiles, columns of `TILES_TABLE`) on the CPU.
        row_sums: how many sums of a tile's rows there are.
        column_sums: how many sums of a tile's columns there are.

    Args:
        shapes: of this rank's parts of the parameters.
        tile_rows: rows of a tile, at most.
    """

    def __init__(self, shapes: Sequence[torch.Size], tile_rows: int) -> None:
        self._shapes: dict[int, torch.Size] = {}
        self._tile_rows = tile_rows
        self.row_sums = self.column_sums = 0
        tiles = []
        for k, shape in enumerate(shapes):
            matrices, rows, columns = _flat(shape)
            if matrices == 0 or rows * columns < _SMALLEST:
                continue
            self._shapes[k] = shape
            blocks, strips = -(-rows // tile_rows), -(-columns // TILE_COLUMNS)
            numbers = (torch.arange(count, device="cpu") for count in (matrices, blocks, strips))
            matrix, block, strip = (part.reshape(-1) for part in torch.meshgrid(*numbers, indexing="ij"))
            row, column = block * tile_rows, strip * TILE_COLUMNS
            entry = (torch.full_like(matrix, value) for value in (k, rows, columns))
            of_tiles = {
                **dict(zip(("entry_index", "rows", "columns"), entry, strict=True)),
                "start": (matrix * rows + row) * columns + column,
                "tile_rows": (rows - row).clamp(max=tile_rows),
                "count": (columns - column).clamp(max=TILE_COLUMNS),
                "first_row_sum": self.row_sums + (strip * matrices + matrix) * rows + row,
                "first_column_sum": self.column_sums + (matrix * blocks + block) * columns + column,
            }
            tiles.append(torch.stack([of_tiles[name] for name in TILES_TABLE], dim=1))
            self.row_sums += strips * matrices * rows
            self.column_sums += matrices * blocks * columns
        self.table = torch.cat(tiles) if tiles else torch.empty(0, len(TILES_TABLE), dtype=torch.int64, device="cpu")

    def empty_sums(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for the sums of all tiles, over rows and over columns; FP64."""
        row_sums, column_sums = (
            torch.empty(count, dtype=torch.float64, device=device) for count in (self.row_sums, self.column_sums)
        )
        return row_sums, column_sums

    def add_up(self, row_sums: Tensor, column_sums: Tensor) -> dict[int, MatrixSums]:
        """The sums by position of the parameter, from those of all tiles; always added in the same order."""
        found = {}
        for k, shape in self._shapes.items():
            matrices, rows, columns = _flat(shape)
            blocks, strips = -(-rows // self._tile_rows), -(-columns // TILE_COLUMNS)
            of_rows, row_sums = row_sums.tensor_split([strips * matrices * rows])
            of_columns, column_sums = column_sums.tensor_split([matrices * blocks * columns])
            found[k] = MatrixSums(
                of_rows.view(strips, matrices, rows).sum(0).view(*shape[:-1], 1),
                of_columns.view(matrices, blocks, columns).sum(1).view(*shape[:-2], 1, columns),
            )
        return found


class MeanVectors:
    """Vectors of the means of all rows, or of all columns, of some parameters, in the parameters' order.

    An operation on a vector is one launch on a GPU; on the means of each parameter, it would be one per parameter.

    Attributes:
        for_rows: repeats a vector with a value for each parameter, so that it has one for each row.
        for_columns: the same for columns.
        for_matrices: the same for matrices.
        rows_of_matrices: repeats a vector with a value for each matrix, so that it has one for each row.

    Args:
        shapes: of this rank's parts of the parameters.
        device: of the vectors.
    """

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device) -> None:
        matrices, rows, columns = torch.tensor([_flat(shape) for shape in shapes], device="cpu").unbind(1)

        def repeat(counts: Tensor) -> Callable[[Tensor], Tensor]:  # with `output_size`, the host need not wait
            return partial(torch.repeat_interleave, repeats=counts.to(device), output_size=int(counts.sum()))

        self.for_rows, self.for_columns = repeat(matrices * rows), repeat(matrices * columns)
        self.for_matrices, self.rows_of_matrices = repeat(matrices), repeat(rows.repeat_interleave(matrices))
        self._row_shapes = [torch.Size((*shape[:-1], 1)) for shape in shapes]
        self._column_shapes = [torch.Size((*shape[:-2], 1, shape[-1])) for shape in shapes]

    def of_rows(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector of all rows: of shape (..., rows, 1) for each parameter."""
        return _parts(vector, self._row_shapes)

    def of_columns(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector of all columns: of shape (..., 1, columns) for each parameter."""
        return _parts(vector, self._column_shapes)


def _parts(vector: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = vector.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _flat(shape: torch.Size) -> tuple[int, int, int]:
    """The number of matrices, their rows and their columns."""
    return math.prod(shape[:-2]), shape[-2], shape[-1]

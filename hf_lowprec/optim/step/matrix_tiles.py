"""Tiles of all factored matrices, whose sums over rows and columns one kernel computes, and vectors of all means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hf_lowprec.optim.step.segments import sum_by_entry

TILE_COLUMNS = 1024
"""The largest number of columns of a tile."""
TILES_TABLE = ("entry_index", "start", "tile_rows", "count", "rows", "columns", "first_row_sum", "first_column_sum")
"""Columns of `MatrixTiles.table`: the entry, the tile's first element in its tensors, the rows and columns of the tile
and of the matrix, and where the tile's sums are written."""
_SMALLEST = 1 << 12
"""The number of elements of the smallest matrix in a stack that is divided. A convolution has many matrices of nine."""


class MatrixSums(NamedTuple):
    """FP64 sums over each row, and over each column, of a rank's part of a parameter: 1-D, matrix by matrix."""

    of_rows: Tensor
    of_columns: Tensor


class _Additions(NamedTuple):
    """The tiles' sums that add up to the sums over each row, or over each column, of all parameters.

    Attributes:
        places: the places of the sums, in groups that are added.
        counts: the number of sums in each group.
        sizes: the number of rows, or columns, of each parameter.
    """

    places: Tensor
    counts: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, of_params: list[Tensor], device: torch.device) -> _Additions:
        """Create them from the places for each parameter, of shape (rows or columns, sums)."""
        places = torch.cat([part.reshape(-1) for part in of_params])
        counts = torch.cat([torch.full(part.shape[:1], part.shape[1], device="cpu") for part in of_params])
        return cls(places.to(device), counts.to(device), list(map(len, of_params)))

    def add_up(self, sums: Tensor) -> Sequence[Tensor]:
        """Return the sums over rows, or over columns, of each parameter; they are always added in the same order."""
        return sum_by_entry(sums.index_select(0, self.places), self.counts).split(self.sizes)


class MatrixTiles:
    """The tiles of some parameters, except stacks of small matrices.

    Attributes:
        table: int64 of shape (tiles, columns of `TILES_TABLE`).

    Args:
        shapes: the shapes of this rank's parts of the parameters.
        tile_rows: the largest number of rows of a tile.
        device: the device of the tables.
    """

    def __init__(self, shapes: Sequence[torch.Size], tile_rows: int, device: torch.device) -> None:
        self._positions: list[int] = []
        self._row_sums = self._column_sums = 0
        of_rows, of_columns = [], []
        tiles = []
        for k, shape in enumerate(shapes):
            matrices, rows, columns = _flat(shape)
            if matrices * rows * columns == 0 or (matrices > 1 and rows * columns < _SMALLEST):
                continue
            self._positions.append(k)
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
                "first_row_sum": self._row_sums + (strip * matrices + matrix) * rows + row,
                "first_column_sum": self._column_sums + (matrix * blocks + block) * columns + column,
            }
            tiles.append(torch.stack([of_tiles[name] for name in TILES_TABLE], dim=1))
            first, self._row_sums = self._row_sums, self._row_sums + strips * matrices * rows
            of_rows.append(torch.arange(first, self._row_sums, device="cpu").view(strips, -1).T)
            first, self._column_sums = self._column_sums, self._column_sums + matrices * blocks * columns
            places = torch.arange(first, self._column_sums, device="cpu").view(matrices, blocks, columns)
            of_columns.append(places.transpose(1, 2).reshape(-1, blocks))
        self.table = torch.cat(tiles).to(device) if tiles else torch.empty(0, dtype=torch.int64, device=device)
        self._additions = [_Additions.of(each, device) for each in (of_rows, of_columns) if each]

    def empty_sums(self) -> tuple[Tensor, Tensor]:
        """Allocate FP64 memory for the sums of all tiles, over rows and over columns."""
        device = self.table.device
        row_sums, column_sums = (
            torch.empty(count, dtype=torch.float64, device=device) for count in (self._row_sums, self._column_sums)
        )
        return row_sums, column_sums

    def add_up(self, *sums: Tensor) -> dict[int, MatrixSums]:
        """Return the sums by position of the parameter, from all tiles' sums over rows and over columns."""
        of_params = (additions.add_up(each) for additions, each in zip(self._additions, sums, strict=False))
        return dict(zip(self._positions, map(MatrixSums, *of_params), strict=True)) if self._positions else {}


class MeanVectors:
    """Vectors of the means of all rows, or of all columns, of some parameters, in the parameters' order.

    An operation on a vector is one launch on a GPU, instead of one per parameter. On a CPU, `index_select` runs in the
    calling thread if the vector is small; `repeat_interleave` and `[]` wake other threads.

    Attributes:
        for_rows: repeats the values of a vector from one per parameter to one per row.
        for_columns: the same for columns.
        for_matrices: the same for matrices.
        rows_of_matrices: repeats the values of a vector from one per matrix to one per row.
        matrices: the number of matrices of each parameter.
        rows: the number of all their rows.
        columns: the number of all their columns.

    Args:
        shapes: the shapes of this rank's parts of the parameters.
        device: the device of the vectors.
    """

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device) -> None:
        matrices, rows, columns = torch.tensor([_flat(shape) for shape in shapes], device="cpu").unbind(1)

        def repeat(counts: Tensor) -> Callable[[Tensor], Tensor]:
            index = torch.arange(len(counts), dtype=torch.int32, device="cpu").repeat_interleave(counts)
            return partial(torch.index_select, dim=0, index=index.to(device))

        self.for_rows, self.for_columns = repeat(matrices * rows), repeat(matrices * columns)
        of_each = rows.repeat_interleave(matrices)
        self.for_matrices, self.rows_of_matrices = repeat(matrices), repeat(of_each)
        self._rows_of_each = of_each.to(device)
        self.matrices, self.rows, self.columns = (
            counts.tolist() for counts in (matrices, matrices * rows, matrices * columns)
        )

    def sums_of_rows(self, vector: Tensor) -> Tensor:
        """Sum the values of a vector over the rows of each matrix; return a vector with a value for each matrix."""
        return sum_by_entry(vector, self._rows_of_each)


def _flat(shape: torch.Size) -> tuple[int, int, int]:
    """Return the numbers of matrices, of their rows and of their columns."""
    return math.prod(shape[:-2]), shape[-2], shape[-1]

"""A dense matrix that is held by rows in CSR form until something reads its elements, and its products.

A bag of words has a few hundred entries among thousands of columns. For a model the matrix is a dense one: parameters
and results are the same. A linear layer multiplies the stored entries only, ``F.dropout`` drops them by the masks of
the dense matrix, and any other function sees a dense tensor, which is computed once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map

from gtrain.nn.csr import Csr, select_rows

_COMPILED = (torch.float32, torch.float64)


class CompressedMatrix(Tensor):
    """A dense matrix ``[n, F]`` in CSR form.

    Its shape, dtype and device are those of the dense matrix, and its ``layout`` is ``torch.strided``. As long as
    :attr:`is_compressed`, ``F.linear`` and products with a dense matrix at its right multiply the stored entries, rows
    may be selected, and ``to`` changes the dtype of the entries. Any other operation expands the matrix: from then on
    it is that dense tensor, which a module may also change in place.

    Args:
        rows: the entries, whose columns are below ``columns``; entries of a row with equal columns add up. ``values``
            has the matrix's dtype; None: each entry is 1.
        columns: F.
        dtype: of the elements.
    """

    _rows: Csr
    _whole: tuple[CompressedMatrix, int] | None
    """The matrix of which these are consecutive rows, and the first of them; None: an own matrix."""
    _dense: Tensor | None
    _by_column: tuple[Tensor, Tensor, Tensor] | None

    @staticmethod
    def __new__(
        cls: type[CompressedMatrix],
        rows: Csr,
        columns: int,
        dtype: torch.dtype,
        whole: tuple[CompressedMatrix, int] | None = None,
    ) -> CompressedMatrix:
        """Make a tensor without memory for its elements."""
        shape = (rows.num_rows, columns)
        matrix = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=rows.ids.device)  # type: ignore[attr-defined]
        matrix._rows, matrix._whole = rows, whole
        matrix._dense = matrix._by_column = None
        return matrix  # type: ignore[no-any-return]

    @property
    def is_compressed(self) -> bool:
        """Whether the matrix was not expanded yet."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._dense is None and (self._whole is None or self._whole[0].is_compressed)

    @property
    def rows(self) -> Csr:
        """The entries by row; without meaning once the matrix is expanded."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._rows

    @property
    def memory_address(self) -> int:
        """An address that identifies the matrix, as ``data_ptr`` identifies another tensor and its first rows."""
        with torch._C.DisableTorchFunctionSubclass():
            first = self._whole[0] if self._whole is not None and self._whole[1] == 0 else self
            return first._rows.offsets.data_ptr()

    def dense(self) -> Tensor:
        """Return the dense tensor, always the same one."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._dense is None:
                if self._whole is None:
                    self._dense = expand(self._rows, self.size(1), self.dtype)
                else:
                    whole, first = self._whole
                    self._dense = whole.dense()[first : first + self.size(0)]
                self._dense.address_before = self.memory_address  # type: ignore[attr-defined]
            return self._dense

    def between(self, first: int, last: int) -> CompressedMatrix:
        """Return the rows ``first .. last-1``, which share the memory of this matrix, also once it is expanded."""
        with torch._C.DisableTorchFunctionSubclass():
            ids, values, offsets = self._rows
            bounds = offsets[first : last + 1]
            start, stop = (int(bounds[0]), int(bounds[-1])) if len(bounds) else (0, 0)
            rows = Csr(ids[start:stop], None if values is None else values[start:stop], bounds - start)
            whole, before = self._whole or (self, 0)
            return CompressedMatrix(rows, self.size(1), self.dtype, (whole, before + first))

    def is_start_of(self, other: object) -> bool:
        """Return whether these are the first rows of another matrix, or the same ones."""
        return other is self or (self._whole is not None and self._whole[0] is other and self._whole[1] == 0)

    def copies_of(self, chosen: Tensor) -> CompressedMatrix:
        """Return copies of some rows, int64 ``[m]``, in this order."""
        with torch._C.DisableTorchFunctionSubclass():
            rows = select_rows(self._rows, chosen.to(self._rows.offsets.device))
            return CompressedMatrix(rows, self.size(1), self.dtype)

    def with_values(self, values: Tensor | None, dtype: torch.dtype) -> CompressedMatrix:
        """Return a matrix with entries at the same positions."""
        with torch._C.DisableTorchFunctionSubclass():
            matrix = CompressedMatrix(self._rows._replace(values=values), self.size(1), dtype)
            matrix._by_column = self._by_column
            return matrix

    def by_column(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the entries by column, as three arrays.

        Returns:
            ``pointers`` int64 ``[F + 1]``: column c has the entries ``pointers[c] .. pointers[c+1]-1``; ``rows`` int32
            ``[Z]``, the row of each; ``positions`` ``[Z]``, int32, or int64 for 2^31 entries or more, the position of
            each among the entries by row.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if self._by_column is None:
                self._by_column = _sorted_by_column(self._rows, self.size(1))
            return self._by_column

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIPTIONS and isinstance(args[0], cls) and args[0].is_compressed:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            result = special(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*_expanded(args), **_expanded(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute with the dense tensor where torch's own code calls an operator."""
        return func(*_expanded(args), **_expanded(kwargs or {}))


def is_compressed(x: object) -> TypeGuard[CompressedMatrix]:
    """Return whether ``x`` is a matrix in CSR form that was not expanded."""
    return isinstance(x, CompressedMatrix) and x.is_compressed


def address_of(x: Tensor) -> int:
    """Return an address that identifies a dense tensor and its first rows; expansion does not change it."""
    if isinstance(x, CompressedMatrix):
        return x.memory_address
    before: int | None = getattr(x, "address_before", None)
    return x.data_ptr() if before is None else before


def with_gradient(x: Any) -> Any:
    """Return an expanded matrix that needs a gradient as its dense tensor, which functions of autograd take.

    Anything else is returned unchanged; values of tuples are replaced.
    """
    if isinstance(x, tuple):
        return tuple(map(with_gradient, x))
    return x.dense() if isinstance(x, CompressedMatrix) and not x.is_compressed and x.requires_grad else x


def as_dense(x: Any) -> Any:
    """Return a :class:`CompressedMatrix` as its dense tensor, and anything else unchanged."""
    return x.dense() if isinstance(x, CompressedMatrix) else x


def expand(rows: Csr, columns: int, dtype: torch.dtype) -> Tensor:
    """Return rows as a dense matrix ``[n, columns]``."""
    dense = torch.zeros(rows.num_rows, columns, dtype=dtype, device=rows.ids.device)
    values = torch.ones((), dtype=dtype, device=rows.ids.device) if rows.values is None else rows.values.to(dtype)
    return dense.index_put_((rows.row_of_entry(), rows.ids.long()), values, accumulate=True)


def linear(x: CompressedMatrix, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.t() + bias``, ``[n, out]``, differentiable in ``weight`` ``[out, F]`` and ``bias``.

    Only the entries of ``x`` are read. Entries are summed in float32, or in float64 if that is the dtype.
    """
    out = multiply(x, weight.t())
    return out if bias is None else out + bias.to(out.dtype)


def multiply(x: CompressedMatrix, table: Tensor) -> Tensor:
    """Return ``x @ table``, ``[n, d]``, differentiable in ``table`` ``[F, d]``."""
    dtype = x.dtype if x.dtype in _COMPILED else torch.float32
    out: Tensor = ProductOfEntries.apply(x, table.to(dtype))
    if torch.is_autocast_enabled(out.device.type) and dtype != torch.float64:  # autocast leaves float64 as it is
        return out.to(torch.get_autocast_dtype(out.device.type))
    return out.to(x.dtype)


class ProductOfEntries(Function):
    """``X T``; the gradient of T is ``X^T G``, summed column by column in a fixed order.

    Attributes:
        rows_address: address of X, on the node of autograd's graph.
    """

    @staticmethod
    def forward(ctx: Any, x: CompressedMatrix, table: Tensor) -> Tensor:  # type: ignore[override]
        ctx.x, ctx.rows_address = x, x.memory_address
        out = table.new_zeros(x.size(0), table.size(1))
        ids, values, offsets = x.rows
        # Compiled loops do not check what they read.
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < x.size(1):
            raise IndexError(f"a matrix of {x.size(1)} columns has entries in columns {ids.min()} to {ids.max()}")
        _add_products(offsets, ids, None, _of_dtype(values, table.dtype), table.detach().contiguous(), out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        x, (gradient,) = ctx.x, gradients
        out = gradient.new_zeros(x.size(1), gradient.size(1))
        pointers, rows, positions = x.by_column()
        values = _of_dtype(x.rows.values, gradient.dtype)
        _add_products(pointers, rows, positions, values, gradient.contiguous(), out)
        return None, out


def _of_dtype(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if values is None else values.to(dtype)


def _add_products(
    pointers: Tensor, ids: Tensor, positions: Tensor | None, values: Tensor | None, table: Tensor, out: Tensor
) -> None:
    """See :func:`.csr_kernels.add_products`; here for any device."""
    if out.device.type == "cpu":
        from gtrain.nn.csr_kernels import add_products

        add_products(pointers, ids, positions, values, table, out)
        return
    rows = torch.repeat_interleave(torch.arange(len(out), device=out.device), pointers.diff())
    for part in range(0, ids.numel(), _BLOCK):
        chosen = slice(part, part + _BLOCK)
        products = table[ids[chosen].long()]
        if values is not None:
            products *= (values[chosen] if positions is None else values[positions[chosen].long()]).unsqueeze(1)
        out.index_add_(0, rows[chosen], products)


_BLOCK = 1 << 16  # entries whose rows are gathered at once on other devices


def _sorted_by_column(rows: Csr, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    row_of_entry = rows.row_of_entry().int()
    few = rows.ids.numel() < 2**31  # positions fit into int32
    if rows.ids.device.type == "cpu" and few:
        from gtrain.nn.csr_kernels import by_column

        return by_column(rows.ids.int(), row_of_entry, columns)
    order = rows.ids.sort(stable=True).indices
    counts = torch.bincount(rows.ids, minlength=columns)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]), row_of_entry[order], order.int() if few else order


def _expanded(values: Any) -> Any:
    return tree_map(as_dense, values)


# ------------------------------------------------------------------------------- what needs no dense matrix


def _linear(x: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    fits = is_compressed(x) and not isinstance(weight, CompressedMatrix) and _multiplies(x, weight.t())
    return linear(x, weight, bias) if fits else NotImplemented


def _matmul(x: Any, other: Any) -> Any:
    return multiply(x, other) if is_compressed(x) and _multiplies(x, other) else NotImplemented


def _multiplies(x: CompressedMatrix, other: Any) -> bool:
    """Whether the sparse product takes a matrix; torch reports mistakes in all other calls."""
    if not isinstance(other, Tensor) or isinstance(other, CompressedMatrix) or other.dim() != 2:
        return False
    if other.layout != torch.strided or other.size(0) != x.size(1) or other.device != x.device:
        return False
    return other.dtype == x.dtype or torch.is_autocast_enabled(x.device.type)


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not is_compressed(x) or inplace or not 0 <= p < 1:
        return NotImplemented
    # Where masks do not depend on ranks, torch.dropout is replaced by a function that drops entries.
    return torch.dropout(x, p, training) if training and p > 0 else x


def _to(x: Any, *args: Any, **kwargs: Any) -> Any:
    if args and is_compressed(args[0]):
        return x.to(args[0].device, args[0].dtype, *args[1:], **kwargs)
    if not is_compressed(x) or kwargs.get("memory_format", torch.preserve_format) != torch.preserve_format:
        return NotImplemented
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
    if (device is not None and device.type != x.device.type) or (dtype is not None and not dtype.is_floating_point):
        return NotImplemented
    if dtype is None or dtype == x.dtype:
        return x if not kwargs.get("copy") else NotImplemented
    values = x.rows.values
    return x.with_values(None if values is None else values.to(dtype), dtype)


def _item(x: Any, index: Any) -> Any:
    if isinstance(index, Tensor):
        if index.dtype != torch.bool:
            return _index_select(x, 0, index)
        return _index_select(x, 0, index.nonzero().flatten()) if index.shape == x.shape[:1] else NotImplemented
    if not is_compressed(x) or not isinstance(index, slice) or index.step not in (None, 1):
        return NotImplemented
    first, last, _ = index.indices(x.size(0))
    return x.between(first, max(first, last))


def _index_select(x: Any, dim: int, index: Tensor) -> Any:
    integers = index.dtype in (torch.int64, torch.int32) and index.dim() == 1
    if not is_compressed(x) or dim not in (0, -2) or not integers:
        return NotImplemented
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < x.size(0):
        return NotImplemented
    return x.copies_of(index.long())


def _narrow(x: Any, dim: int, start: Any, length: Any) -> Any:
    if not is_compressed(x) or dim not in (0, -2) or isinstance(start, Tensor) or not 0 <= start <= x.size(0):
        return NotImplemented
    return x.between(start, start + length) if start + length <= x.size(0) else NotImplemented


def _new(make: Callable[..., Any]) -> Callable[..., Any]:
    def new(x: Any, *args: Any, **kwargs: Any) -> Any:
        return make(x.rows.offsets, *args, **{"dtype": x.dtype, **kwargs}) if is_compressed(x) else NotImplemented

    return new


def _to_sparse_csr(x: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_compressed(x) or args or kwargs:
        return NotImplemented
    ids, values, offsets = x.rows
    values = torch.ones(len(ids), dtype=x.dtype, device=ids.device) if values is None else values
    # torch warns once per process that the layout is in beta.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(offsets, ids.long(), values, size=tuple(x.shape), check_invariants=False)


def _detach(x: Any) -> Any:
    return x.between(0, x.size(0)) if is_compressed(x) else NotImplemented


def _same(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x if is_compressed(x) and not args and not kwargs else NotImplemented


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    pieces = list(tensors)
    if not all(map(is_compressed, pieces)) or dim not in (0, -2) or len({(p.size(1), p.dtype) for p in pieces}) > 1:
        return NotImplemented
    matrices: list[Any] = pieces
    return concatenate(matrices)


def concatenate(pieces: Sequence[CompressedMatrix]) -> CompressedMatrix:
    """Return the rows of several matrices, one after another; they have equal columns and dtypes."""
    columns, dtype, rows = pieces[0].size(1), pieces[0].dtype, [piece.rows for piece in pieces]
    lengths = torch.cat([piece.offsets.diff() for piece in rows])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = None
    if any(piece.values is not None for piece in rows):
        ones = [
            torch.ones(len(p.ids), dtype=dtype, device=p.ids.device) if p.values is None else p.values for p in rows
        ]
        values = torch.cat(ones)
    return CompressedMatrix(Csr(torch.cat([piece.ids for piece in rows]), values, offsets), columns, dtype)


_PROPERTIES = (
    *("shape", "ndim", "dtype", "device", "layout", "requires_grad", "grad", "grad_fn", "is_leaf", "is_sparse"),
    *("is_sparse_csr", "is_cuda", "is_quantized", "is_nested", "is_mkldnn", "is_meta", "itemsize", "nbytes"),
    *("_version", "output_nr", "_backward_hooks", "retains_grad"),
)
_DESCRIPTIONS = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.element_size, Tensor.is_contiguous),
    *(Tensor.is_inference, Tensor.__hash__, Tensor.get_device, Tensor.storage_offset),
    *(torch.is_floating_point, torch.is_complex, torch.is_inference, torch.numel),
}
"""Functions that read nothing but the shape, dtype and other properties that the dense tensor has too."""

_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.linear: _linear,
    torch.nn.functional.dropout: _dropout,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    **dict.fromkeys((Tensor.detach, torch.detach), _detach),
    Tensor.cpu: _same,
    Tensor.to: _to,
    Tensor.to_sparse_csr: _to_sparse_csr,
    Tensor.float: lambda x, **k: _to(x, torch.float32, **k),
    Tensor.double: lambda x, **k: _to(x, torch.float64, **k),
    Tensor.bfloat16: lambda x, **k: _to(x, torch.bfloat16, **k),
    **{make: _new(make) for make in (Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full)},
    Tensor.__getitem__: _item,
    **dict.fromkeys((Tensor.index_select, torch.index_select), _index_select),
    **dict.fromkeys((Tensor.narrow, torch.narrow), _narrow),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _cat),
}
"""Functions that may need no dense matrix; they return NotImplemented where they do."""

"""A matrix in CSR form gives what the dense matrix gives, and stays in CSR form where nothing reads its elements."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

from gtrain.nn import Csr, SparseLinear
from gtrain.nn.compressed import CompressedMatrix, as_dense, concatenate, is_compressed

ROWS, COLUMNS = 40, 30


def pair(dtype: torch.dtype = torch.float64, *, ones: bool = False, seed: int = 0) -> tuple[CompressedMatrix, Tensor]:
    """A matrix, with an empty row and column, and the same one as a dense tensor."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(ROWS, COLUMNS, dtype=dtype, generator=generator)
    dense *= torch.rand(ROWS, COLUMNS, generator=generator) < 0.2
    dense[3], dense[:, 7] = 0, 0
    dense = (dense != 0).to(dtype) if ones else dense
    rows, ids = dense.nonzero(as_tuple=True)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), (dense != 0).sum(1).cumsum(0)])
    values = None if ones else dense[rows, ids]
    return CompressedMatrix(Csr(ids.int(), values, offsets), COLUMNS, dtype), dense


def test_it_is_described_as_the_dense_matrix() -> None:
    x, dense = pair()
    assert (x.shape, x.dtype, x.layout, x.device, len(x)) == (
        dense.shape,
        dense.dtype,
        torch.strided,
        dense.device,
        ROWS,
    )
    assert x.is_floating_point() and not x.requires_grad and x.stride() == dense.stride() and x.numel() == dense.numel()
    assert is_compressed(x)


def test_a_sparse_layer_takes_it() -> None:
    x, dense = pair()
    layer = SparseLinear(COLUMNS, 4).double()
    torch.testing.assert_close(layer(x[torch.tensor([4, 2])]), layer(dense[torch.tensor([4, 2])]))
    assert is_compressed(x)


def test_other_tensors_are_made_like_it() -> None:
    x, _ = pair(torch.float32)
    assert torch.zeros(2, dtype=torch.float64).to(x).dtype == torch.float32
    assert (x.new_zeros((2, 3)).shape, x.new_empty(2).dtype, x.new_ones(1, dtype=torch.int64).dtype) == (
        (2, 3),
        torch.float32,
        torch.int64,
    )
    assert is_compressed(x)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_multiplies_the_entries(ones: bool, bias: bool) -> None:
    x, dense = pair(ones=ones)
    layer, reference = (nn.Linear(COLUMNS, 5, bias=bias, dtype=torch.float64) for _ in range(2))
    reference.load_state_dict(layer.state_dict())
    out, expected = layer(x), reference(dense)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for parameter, other in zip(layer.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-12)
    assert is_compressed(x)


def test_entries_of_a_row_with_equal_columns_add_up() -> None:
    x = CompressedMatrix(
        Csr(torch.tensor([1, 1, 0]), torch.tensor([2.0, 3.0, 1.0]), torch.tensor([0, 2, 3])), 2, torch.float32
    )
    assert (x @ torch.eye(2)).tolist() == [[0.0, 5.0], [1.0, 0.0]] == as_dense(x).tolist()


def test_many_rows_are_divided_among_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from gtrain.nn import csr_kernels

    monkeypatch.setattr(csr_kernels, "num_threads", lambda: 3)
    monkeypatch.setattr(csr_kernels, "_RANGE_ENTRIES", 10)
    assert len(csr_kernels._ranges(pair()[0].rows.offsets.numpy())) > 5
    test_a_linear_layer_multiplies_the_entries(False, True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[5:20],
        lambda x: x[:0],
        lambda x: x[30:],
        lambda x: x.narrow(0, 2, 7),
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu"),
        lambda x: x.to(torch.zeros(1, dtype=torch.float32)),
        lambda x: x[4:30][2:9],
        lambda x: x[torch.tensor([3, 1, 1, 39])],
        lambda x: x[torch.arange(ROWS) % 3 == 1],
        lambda x: x.index_select(0, torch.tensor([3, 1])),
        lambda x: torch.cat([x, x[3:5]]),
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: Data(x=x, edge_index=torch.zeros(2, 0, dtype=torch.int64)).to("cpu").x,
    ],
)  # fmt: skip
def test_some_functions_keep_it_compressed(function: Callable[[Tensor], Tensor]) -> None:
    x, dense = pair()
    out, expected = function(x), function(dense)
    assert is_compressed(out) and is_compressed(x)
    assert out.dtype == expected.dtype and out.shape == expected.shape
    table = torch.randn(COLUMNS, 3, dtype=expected.dtype)
    torch.testing.assert_close(out @ table, expected @ table)
    assert torch.equal(as_dense(out), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x[torch.tensor([3, -1])],
        lambda x: x[torch.tensor([[3, 1]])],
        lambda x: x[torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) % 7 == 1],
        lambda x: x[torch.tensor(True)],
        lambda x: x[:, 2],
        lambda x: x[1],
        lambda x: x.sum(0),
        lambda x: torch.stack([x, x]),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.nn.functional.normalize(x),
        lambda x: x.t() @ x,
        lambda x: torch.eye(ROWS, dtype=x.dtype) @ x,
        lambda x: x.clone(),
        lambda x: x.contiguous(),  # before code of other libraries reads memory
        lambda x: torch.from_dlpack(x),
        lambda x: copy.deepcopy(x),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: torch.tensor(x.tolist(), dtype=x.dtype),
    ],
)  # fmt: skip
def test_other_functions_see_the_dense_matrix(function: Callable[[Tensor], Tensor]) -> None:
    x, dense = pair()
    out = function(x)
    assert type(out) is Tensor and torch.equal(out, function(dense))
    assert not is_compressed(x)


def test_a_module_may_change_it_in_place() -> None:
    x, dense = pair()
    head = x[:4]
    head += 1
    dense[:4] += 1
    x[5, 2] = 9.0
    dense[5, 2] = 9.0
    assert torch.equal(as_dense(x), dense)
    torch.testing.assert_close(x @ torch.ones(COLUMNS, 1, dtype=x.dtype), dense.sum(1, keepdim=True))


def test_a_gradient_of_the_features_is_that_of_the_dense_matrix() -> None:
    x, dense = pair()
    x.requires_grad_()
    weight = torch.randn(3, COLUMNS, dtype=torch.float64)
    F.linear(x, weight).sum().backward()
    assert torch.equal(x.grad, weight.sum(0).expand_as(dense))
    x, _ = pair()
    apart = x.detach()
    assert is_compressed(apart) and apart.requires_grad_().requires_grad and not x.requires_grad
    apart.data[3, 3] = 5
    assert float(x[3, 3]) == 5


def test_mistakes_are_reported_as_for_the_dense_matrix() -> None:
    x, dense = pair()
    for wrong in (torch.randn(3, COLUMNS + 1, dtype=torch.float64), torch.randn(3, COLUMNS)):
        with pytest.raises(RuntimeError) as expected:
            F.linear(dense, wrong)
        with pytest.raises(RuntimeError) as actual:
            F.linear(x, wrong)
        assert str(actual.value) == str(expected.value)


def test_an_entry_outside_of_the_matrix_is_refused() -> None:
    x = CompressedMatrix(Csr(torch.tensor([0, 2]), None, torch.tensor([0, 2])), 2, torch.float32)
    with pytest.raises(IndexError, match="2 columns has entries in columns 0 to 2"):
        x @ torch.eye(2)


def test_bfloat16_sums_in_float32() -> None:
    x, dense = pair(torch.bfloat16)
    weight = torch.randn(4, COLUMNS).bfloat16()
    out = F.linear(x, weight)
    assert out.dtype == torch.bfloat16 and is_compressed(x)
    assert torch.equal(out, F.linear(dense.float(), weight.float()).bfloat16())


def test_autocast_chooses_the_dtype_of_the_result() -> None:
    x, _ = pair(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.Linear(COLUMNS, 3)(x).dtype == torch.bfloat16
    assert is_compressed(x)


def test_matrices_with_and_without_values_are_joined() -> None:
    (x, dense), (ones, other) = pair(), pair(ones=True, seed=1)
    assert torch.equal(as_dense(concatenate([x, ones])), torch.cat([dense, other]))

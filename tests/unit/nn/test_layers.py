"""gtrain.nn: layers against torch's own, sparse rows, and initial rows of tables."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from gtrain.errors import ConfigError, DataError
from gtrain.nn import Csr, Embedding, EmbeddingBag, SparseLinear, as_csr, select_rows, tables
from gtrain.nn.csr import coalesce, product
from gtrain.nn.table import INIT_ROWS, TableSpec


def dense_rows(rows: int, columns: int) -> Tensor:
    """A matrix with a third of its entries, and a row without any."""
    generator = torch.Generator().manual_seed(rows + columns)
    dense = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    dense *= torch.rand(rows, columns, generator=generator) < 0.3
    dense[1] = 0
    return dense


def empty(rows: int) -> Csr:
    return Csr(torch.empty(0, dtype=torch.int64), torch.empty(0), torch.zeros(rows + 1, dtype=torch.int64))


@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_linear_is_a_linear_layer(sparse: bool) -> None:
    layer, reference = SparseLinear(20, 5, sparse=sparse).double(), nn.Linear(20, 5).double()
    with torch.no_grad():
        layer.bias.normal_()
        reference.weight.copy_(layer.weight.T)
        reference.bias.copy_(layer.bias)
    dense = dense_rows(7, 20).requires_grad_()
    rows = as_csr(dense.detach())
    values = rows.values.clone().requires_grad_()
    for given in (dense.detach().to_sparse_csr(), rows, (rows.ids.int(), rows.values, rows.offsets.int())):
        torch.testing.assert_close(layer(given), reference(dense), rtol=0, atol=1e-14)
    layer(rows._replace(values=values)).square().sum().backward()
    reference(dense).square().sum().backward()
    assert layer.weight.grad.is_sparse == sparse
    torch.testing.assert_close(layer.weight.grad.to_dense(), reference.weight.grad.T, rtol=0, atol=1e-13)
    torch.testing.assert_close(layer.bias.grad, reference.bias.grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(values.grad, dense.grad[rows.row_of_entry(), rows.ids], rtol=0, atol=1e-13)


def test_a_sparse_gradient_has_the_rows_that_occur_and_no_others() -> None:
    layer = SparseLinear(1000, 2, sparse=True)
    layer(Csr(torch.tensor([7, 900, 7]), None, torch.tensor([0, 2, 3]))).sum().backward()
    assert layer.weight.grad._indices().tolist() == [[7, 900]]
    assert layer.weight.grad._values().tolist() == [[2.0, 2.0], [1.0, 1.0]]


def test_values_that_change_between_steps_are_those_of_the_gradient() -> None:
    """Also where the memory of the ones before is used again."""
    ids, offsets = torch.randint(50, (6000,)), torch.arange(0, 6001, 10)
    layer = SparseLinear(50, 4)
    for step in range(8):
        torch.manual_seed(step)
        values, gradient = torch.randn(6000), torch.randn(600, 4)
        layer.weight.grad = None
        (layer(Csr(ids, values, offsets)) * gradient).sum().backward()
        entries = values[:, None] * gradient.repeat_interleave(10, dim=0)
        torch.testing.assert_close(
            layer.weight.grad, torch.zeros(50, 4).index_add(0, ids, entries), rtol=1e-4, atol=1e-4
        )
        del values, gradient, entries


def test_the_product_passes_torchs_gradient_check() -> None:
    rows = as_csr(dense_rows(4, 6))
    table = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    values = rows.values.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda w, v: product(rows._replace(values=v), w), (table, values))


def test_rows_without_entries_and_batches_without_rows() -> None:
    layer = SparseLinear(5, 3)
    assert layer(empty(0)).shape == (0, 3)
    layer(empty(2)).sum().backward()
    assert not layer.weight.grad.any() and layer.bias.grad.tolist() == [2.0] * 3
    sparse = SparseLinear(5, 3, sparse=True)
    sparse(empty(2)).sum().backward()
    assert sparse.weight.grad._nnz() == 0


def test_it_starts_as_a_linear_layer_does() -> None:
    torch.manual_seed(0)
    layer = SparseLinear(400, 300)
    assert float(layer.weight.abs().max()) <= 1 / 20
    assert float(layer.weight.std()) == pytest.approx(1 / 20 / 3**0.5, rel=0.01)
    assert not layer.bias.any()
    assert float(SparseLinear(40, 30, init_bound=0.5).weight.abs().max()) == pytest.approx(0.5, rel=0.01)


def test_another_number_of_features_is_refused() -> None:
    with pytest.raises(DataError, match="over 5 features was called with rows of 6"):
        SparseLinear(5, 3)(torch.eye(6).to_sparse_csr())


def test_rows_are_selected_in_the_order_asked_for() -> None:
    dense = dense_rows(9, 6)
    chosen = torch.tensor([4, 1, 4, 0])
    for matrix in (dense.to_sparse_csr(), as_csr(dense)):
        picked = select_rows(matrix, chosen)
        assert picked.num_rows == 4
        back = torch.sparse_csr_tensor(picked.offsets, picked.ids, picked.values, (4, 6)).to_dense()
        assert torch.equal(back, dense[chosen])
    assert select_rows(dense.to_sparse_csr(), torch.empty(0, dtype=torch.int64)).num_rows == 0


def test_equal_ids_add_up() -> None:
    ids, rows = coalesce(torch.tensor([4, 1, 4, 4]), torch.tensor([[1.0], [2.0], [4.0], [8.0]]))
    assert ids.tolist() == [1, 4] and rows.tolist() == [[2.0], [13.0]]


@pytest.mark.parametrize("sparse", [False, True])
def test_embedding_is_torchs(sparse: bool) -> None:
    ours, torchs = Embedding(6, 4, sparse=sparse), nn.Embedding(6, 4)
    torchs.load_state_dict(ours.state_dict())
    ids = torch.tensor([[1, 5], [5, 0]])
    assert torch.equal(ours(ids), torchs(ids)) and ours(ids).shape == (2, 2, 4)
    for layer in (ours, torchs):
        layer(ids).pow(2).sum().backward()
    assert ours.weight.grad.is_sparse == sparse
    assert torch.equal(ours.weight.grad.to_dense(), torchs.weight.grad)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_are_sums_and_means(mode: str) -> None:
    layer = EmbeddingBag(6, 4, mode=mode).double()
    bags = Csr(torch.tensor([3, 3, 0, 5]), None, torch.tensor([0, 3, 3, 4]))
    rows = [layer.weight[bags.ids[a:b]] for a, b in pairwise(bags.offsets.tolist())]
    wanted = [r.sum(0) if mode == "sum" or not len(r) else r.mean(0) for r in rows]
    torch.testing.assert_close(layer(bags), torch.stack(wanted))
    weighted = bags._replace(values=torch.tensor([1.0, 2.0, 5.0, 4.0], dtype=torch.float64))
    weight = layer.weight
    first = 3 * weight[3] + 5 * weight[0]
    wanted = [first, 0 * first, 4 * weight[5]] if mode == "sum" else [first / 8, 0 * first, weight[5]]
    torch.testing.assert_close(layer(weighted), torch.stack(wanted))


def test_an_unknown_mode_lists_the_modes() -> None:
    with pytest.raises(ConfigError, match="choose sum or mean"):
        EmbeddingBag(6, 4, mode="max")


def test_tables_are_found_and_their_names_are_natural() -> None:
    model = nn.ModuleDict({"embedding": Embedding(3, 2, node_type="paper"), "wide": SparseLinear(4, 2)})
    assert set(model.state_dict()) == {"embedding.weight", "wide.weight", "wide.bias"}
    found = dict(tables(model))
    assert set(found) == {"embedding", "wide"}
    paper, features = found["embedding"].table, found["wide"].table
    assert (paper.name, paper.rows, paper.dim, paper.ids) == ("paper", 3, 2, "orig_id")
    assert (features.name, features.rows, features.dim, features.ids) == ("features", 4, 2, "feature")


def test_a_copied_layer_reads_its_own_rows() -> None:
    layer = Embedding(3, 2)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.zero_()
    assert copied(torch.tensor([0])).any()


def test_initial_rows_are_the_same_in_any_blocks() -> None:
    rows = 2 * INIT_ROWS + 100
    for init in ("normal", "uniform"):
        table = TableSpec("node", rows, 3, init=init, scale=0.1, seed=5)
        whole = table.initial(0, rows)
        cuts = [0, 10, INIT_ROWS, INIT_ROWS + 1, 2 * INIT_ROWS + 7, rows]
        assert torch.equal(torch.cat([table.initial(a, b) for a, b in pairwise(cuts)]), whole)
        assert float(whole.std()) == pytest.approx(0.1 if init == "normal" else 0.1 / 3**0.5, rel=0.02)
        assert not torch.equal(whole[:100], whole[INIT_ROWS : INIT_ROWS + 100])


def test_equally_seeded_layers_are_equal_in_any_precision() -> None:
    made = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(3)
        made.append(Embedding(5, 2, dtype=dtype).weight.detach().double())
    assert torch.equal(*made)
    assert not torch.equal(made[0], Embedding(5, 2).weight)

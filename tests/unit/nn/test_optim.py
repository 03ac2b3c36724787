"""The optimizers of tables against torch's dense ones, and against rows computed one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gtrain.errors import ConfigError
from gtrain.nn import SGD, Adagrad, Embedding, JointOptimizer, LazyAdam, RowwiseAdagrad

Make = Callable[[Any], Optimizer]


def start(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-1, 1, 18, dtype=dtype).view(6, 3)


def train(make: Make, gradients: list[Tensor], sparse: bool = False, rows: slice = slice(None)) -> Tensor:
    """Some rows of the table after a step for each gradient."""
    table = nn.Parameter(start(gradients[0].dtype)[rows].clone())
    optimizer = make([table])
    for gradient in gradients:
        table.grad = gradient.to_sparse(1) if sparse else gradient.clone()
        optimizer.step()
    return table.data


def full_gradients(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 3, dtype=torch.float64, generator=generator).to(dtype) for _ in range(5)]


def partial_gradients() -> list[Tensor]:
    """Gradients in which some rows are zero, another set at each step."""
    return [g * (torch.arange(6) % (i + 2) == 0).unsqueeze(1) for i, g in enumerate(full_gradients())]


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (lambda p: SGD(p, lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (lambda p: SGD(p, lr=0.1, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1)),
        (
            lambda p: Adagrad(p, lr=0.1, initial_accumulator=0.5, weight_decay=0.1),
            lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5, weight_decay=0.1),
        ),
        (lambda p: LazyAdam(p, lr=0.1), lambda p: torch.optim.Adam(p, lr=0.1)),
        (
            lambda p: LazyAdam(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.1),
            lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.1),
        ),
    ],
    ids=["sgd", "sgd decay", "adagrad", "adam", "adam decay"],
)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_where_every_row_has_a_gradient_it_is_torchs(
    ours: Make, torchs: Make, sparse: bool, dtype: torch.dtype, tolerance: float
) -> None:
    gradients = full_gradients(dtype)
    found = train(ours, gradients, sparse)
    torch.testing.assert_close(found, train(torchs, gradients), rtol=tolerance, atol=tolerance)
    assert not torch.equal(found, start(dtype))


@pytest.mark.parametrize("make", [SGD, Adagrad, RowwiseAdagrad, LazyAdam])
def test_sparse_and_dense_gradients_train_the_same(make: Callable[..., Optimizer]) -> None:
    """Weight decay and momentum of a row wait until it has a gradient."""
    found = [train(lambda p: make(p, lr=0.1, weight_decay=0.1), partial_gradients(), s) for s in (False, True)]
    assert torch.equal(*found)
    untouched = torch.stack(partial_gradients()).abs().sum((0, 2)) == 0
    assert untouched.tolist() == [False, True, False, False, False, False]
    assert torch.equal(found[0][untouched], start()[untouched])


@pytest.mark.parametrize("make", [SGD, Adagrad, RowwiseAdagrad, LazyAdam])
def test_a_rows_path_depends_on_that_row_alone(make: Callable[..., Optimizer]) -> None:
    found = train(lambda p: make(p, lr=0.1), partial_gradients())
    for row in range(6):
        own = [g[row : row + 1] for g in partial_gradients() if g[row].any()]
        if own:
            alone = train(lambda p: make(p, lr=0.1), own, rows=slice(row, row + 1))
            torch.testing.assert_close(found[row : row + 1], alone, rtol=1e-14, atol=1e-14)


def test_lazy_adam_of_a_row_is_adam_over_its_own_gradients() -> None:
    found = train(lambda p: LazyAdam(p, lr=0.1), partial_gradients())
    own = [g[4:5] for g in partial_gradients() if g[4].any()]
    assert 1 < len(own) < 5
    wanted = train(lambda p: torch.optim.Adam(p, lr=0.1), own, rows=slice(4, 5))
    torch.testing.assert_close(found[4:5], wanted, rtol=1e-12, atol=1e-12)


def test_rowwise_adagrad_by_hand() -> None:
    found = train(lambda p: RowwiseAdagrad(p, lr=0.5, eps=0.25, initial_accumulator=1.0), partial_gradients())
    table = start().tolist()
    for row in range(6):
        total = 1.0
        for gradient in partial_gradients():
            g = gradient[row].tolist()
            if any(g):
                total += sum(v * v for v in g) / 3
                table[row] = [w - 0.5 * v / (math.sqrt(total) + 0.25) for w, v in zip(table[row], g, strict=True)]
    torch.testing.assert_close(found, torch.tensor(table, dtype=torch.float64), rtol=1e-13, atol=1e-13)


def test_rows_named_twice_in_a_gradient_add_up_before_they_are_squared() -> None:
    table = nn.Parameter(torch.zeros(3, 2))
    table.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([[1.0, 0.0], [2.0, 4.0]]), (3, 2))
    optimizer = RowwiseAdagrad([table], lr=1.0)
    optimizer.step()
    assert optimizer.state[table]["sum"].tolist() == [0, 12.5, 0]
    torch.testing.assert_close(table.data, torch.tensor([[0, 0], [-3, -4], [0, 0]]) / math.sqrt(12.5))


def test_adagrad_takes_a_dense_gradient_in_one_kernel_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_blocks(*_: object) -> None:
        raise AssertionError("rows were updated block by block")

    monkeypatch.setattr("gtrain.nn.rules.update", by_blocks)
    weight = nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.zeros(4, 3)
    weight.grad[1] = 2.0
    Adagrad([weight], lr=0.5).step()
    assert weight[:, 0].tolist() == [1.0, 0.5, 1.0, 1.0], "rows without a gradient stay as they are"
    for other in (Adagrad([weight], lr=0.5, weight_decay=0.1), RowwiseAdagrad([weight], lr=0.5)):
        with pytest.raises(AssertionError, match="block by block"):
            other.step()


def test_parameters_of_any_shape_are_tables() -> None:
    bias, kernel = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 3, 4))
    bias.grad, kernel.grad = torch.tensor([0.0, 2.0, -4.0]), torch.ones(2, 3, 4)
    optimizer = RowwiseAdagrad([bias, kernel], lr=1.0)
    optimizer.step()
    torch.testing.assert_close(bias.data, torch.tensor([0.0, -1.0, 1.0]))
    torch.testing.assert_close(kernel.data, -torch.ones(2, 3, 4))
    assert optimizer.state[kernel]["sum"].tolist() == [1.0, 1.0]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Embedding(5, 3, sparse=True), nn.Linear(3, 1))


def joint(network: nn.Sequential, make: Callable[..., Optimizer]) -> tuple[JointOptimizer, Any]:
    parts = [torch.optim.Adam(network[1].parameters(), lr=0.01), make(network[0].parameters(), lr=0.1)]
    optimizer = JointOptimizer(parts)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def steps(network: nn.Sequential, optimizer: JointOptimizer, scheduler: Any, numbers: range) -> None:
    for number in numbers:

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss = network(torch.tensor([number % 5, 1])).square().sum()
            loss.backward()
            return loss

        assert float(optimizer.step(closure)) > 0
        scheduler.step()


@pytest.mark.parametrize("make", [RowwiseAdagrad, LazyAdam, torch.optim.Adagrad])  # the last has state from its start
def test_a_joint_optimizer_goes_on_where_it_was_saved(make: Callable[..., Optimizer]) -> None:
    straight, halted, again = model(), model(), model()
    steps(straight, *joint(straight, make), range(6))
    optimizer, scheduler = joint(halted, make)
    steps(halted, optimizer, scheduler, range(3))
    again.load_state_dict(halted.state_dict())
    resumed, resumed_scheduler = joint(again, make)
    resumed.load_state_dict(optimizer.state_dict())
    resumed_scheduler.load_state_dict(scheduler.state_dict())
    assert len(resumed.state) == 3
    steps(again, resumed, resumed_scheduler, range(3, 6))
    for name, value in straight.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert [group["lr"] for group in resumed.param_groups] == [0.01 / 8, 0.1 / 8]


@pytest.mark.parametrize("wrap", [lambda part: part, lambda part: JointOptimizer([part])], ids=["alone", "joint"])
def test_state_of_rows_is_loaded_to_the_device_of_the_table(wrap: Callable[[Optimizer], Optimizer]) -> None:
    """Torch and Lightning leave a state named ``step`` where it was saved."""
    trained = nn.Parameter(torch.ones(4, 2))
    trained.grad = torch.ones(4, 2)
    optimizer = wrap(LazyAdam([trained]))
    optimizer.step()
    table = nn.Parameter(torch.ones(4, 2, device="meta"))
    loaded = wrap(LazyAdam([table]))
    loaded.load_state_dict(optimizer.state_dict())
    assert {name: value.device.type for name, value in loaded.state[table].items()} == {
        "step": "meta",
        "mean": "meta",
        "square": "meta",
    }


def test_a_joint_optimizer_steps_each_part_by_its_own_rule() -> None:
    together, apart = model(), model()
    steps(together, *joint(together, SGD), range(3))
    parts = [torch.optim.Adam(apart[1].parameters(), lr=0.01), SGD(apart[0].parameters(), lr=0.1)]
    for number in range(3):
        for group in (part.param_groups[0] for part in parts):
            group["lr"] *= 0.5 if number == 2 else 1
        for part in parts:
            part.zero_grad()
        apart(torch.tensor([number % 5, 1])).square().sum().backward()
        for part in parts:
            part.step()
    for name, value in apart.state_dict().items():
        assert torch.equal(together.state_dict()[name], value)


def test_settings_out_of_range_are_refused() -> None:
    table = [nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(ConfigError, match=r"Adagrad\(lr=-1\)"):
        Adagrad(table, lr=-1)
    with pytest.raises(ConfigError, match="below 1"):
        LazyAdam(table, betas=(0.9, 1.0))

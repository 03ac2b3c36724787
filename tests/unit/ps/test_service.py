"""Parameter servers over the wire, within one process: what workers train on them is what one process trains."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import LIMIT
from torch import Tensor, nn

from gtrain.errors import CheckpointError, DataError
from gtrain.nn import Adagrad, Csr, Embedding, LazyAdam, RowwiseAdagrad, SparseLinear, select_rows
from gtrain.wire import Client, Limits, Message, Server
from gtrain_ps.checkpoints import read_blocks, read_table, write_blocks
from gtrain_ps.costs import Load, Plan
from gtrain_ps.placement import Placement, spreading_multiplier
from gtrain_ps.server.block import Block
from gtrain_ps.server.engine import Engine
from gtrain_ps.server.journal import Journal
from gtrain_ps.server.memory import ServerMemory
from gtrain_ps.server.requests import Commit, ProductRequest
from gtrain_ps.server.service import METHODS, ParameterService
from gtrain_ps.worker.served_table import ServerTableStorage
from gtrain_ps.worker.servers import ParameterServers
from gtrain_ps.worker.steps import flat_gradients, send_step, set_gradients

FEATURES, HIDDEN, ROWS, STEPS = 90, 6, 24, 6


class Service:
    """One parameter server, which can end at any moment and come again with what its memory, or its disk, keeps."""

    def __init__(self, folder: Path, number: int, workers: int, lag: int, disk: int = 0) -> None:
        self.number, self.workers, self.lag = number, workers, lag
        self.disk, self.folder = disk, folder / f"{number}.disk"
        self.memory = ServerMemory()
        self.memory.survives = not disk
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(folder / f"{number}"))
        self.socket.listen(64)
        self.start()

    def start(self) -> None:
        if self.disk:
            self.memory, journal = ServerMemory(), Journal(self.folder, {}, log_bytes=self.disk)
            journal.load(self.memory)
        self.engine = Engine(self.workers, self.lag, self.memory)
        parameters = ParameterService(self.engine, self.number)
        if self.disk:
            parameters.replay_journal(journal)
        methods = {name: getattr(parameters, name) for name in METHODS}
        server = Server(methods, name=f"parameter {self.number}", descriptor=self.socket.fileno())
        self.server = server.start(self.engine.work)

    def end(self) -> None:
        self.server.close()

    def restart(self) -> None:
        """Lose everything but the memory."""
        self.end()
        self.start()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Callable[..., list[Service]]]:
    started: list[Service] = []

    def start(count: int, workers: int, lag: int = 0, disk: int = 0) -> list[Service]:
        started.extend(Service(tmp_path, number, workers, lag, disk) for number in range(count))
        return started

    yield start
    for service in started:
        service.end()
        service.socket.close()


class Net(nn.Module):
    """A wide layer, an embedding of each row, and a layer on top."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = SparseLinear(FEATURES, HIDDEN, sparse=True, dtype=torch.float64, init_bound=0.3)
        self.ids = Embedding(ROWS, HIDDEN, sparse=True, dtype=torch.float64)
        self.rest = nn.Linear(HIDDEN, 1).double()

    def forward(self, rows: Csr, ids: Tensor) -> Tensor:
        scores: Tensor = self.rest(torch.tanh(self.wide(rows) + self.ids(ids))).squeeze(1)
        return scores


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    dense = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    kept = torch.rand(ROWS, FEATURES, generator=generator) < 0.1
    return (dense * kept).to_sparse_csr(), (torch.rand(ROWS, generator=generator) < 0.5).double()


def made() -> Net:
    torch.manual_seed(1)
    return Net()


def optimizers(net: Net, kind: Any) -> tuple[Any, torch.optim.Optimizer]:
    return kind([net.wide.weight, net.ids.weight], lr=0.1), torch.optim.SGD(
        [*net.rest.parameters(), net.wide.bias], lr=0.1
    )


def alone(kind: Any, steps: int = STEPS) -> tuple[list[float], Net]:
    """The losses of one process on all rows."""
    net, (x, y) = made(), data()
    tables, rest = optimizers(net, kind)
    losses = []
    for _ in range(steps):
        loss = F.binary_cross_entropy_with_logits(net(select_rows(x, torch.arange(ROWS)), torch.arange(ROWS)), y)
        losses.append(float(loss.detach()))
        for one in (tables, rest):
            one.zero_grad()
        loss.backward()
        for one in (tables, rest):
            one.step()
    return losses, net


def together(
    services: list[Service],
    kind: Any,
    shape: tuple[int, int],
    *,
    lag: int = 0,
    pull: bool = False,
    steps: int = STEPS,
    at: Callable[[int, int], None] = lambda worker, step: None,
) -> tuple[list[float], list[Tensor]]:
    """The losses of workers that share the rows, and what the tables are afterwards."""
    workers = services[0].workers
    x, y = data()
    start = threading.Barrier(workers)
    models = [made() for _ in range(workers)]

    def work(worker: int) -> tuple[list[float], list[Tensor]]:
        net, mine = models[worker], torch.arange(ROWS)[worker * ROWS // workers : (worker + 1) * ROWS // workers]
        tables, rest = optimizers(net, kind)
        with ExitStack() as stack:
            address = [f"ipc://{service.socket.getsockname()}" for service in services]
            clients = [
                stack.enter_context(Client(where, peer=f"parameter {n}", name=f"rank {worker}", timeout_seconds=LIMIT))
                for n, where in enumerate(address)
            ]
            servers = ParameterServers(clients, restartable=True)
            storages = {}
            for name, layer in (("wide", net.wide), ("ids", net.ids)):
                cut = shape if name == "wide" else (len(services), 1)
                place = Placement(layer.table.rows, HIDDEN, *cut, spreading_multiplier(layer.table.rows))
                storages[name] = ServerTableStorage(
                    name, layer.table, place, servers, torch.float64, torch.float64, pull
                )
                storages[name].open()
                layer.move(storages[name])
            start.wait()
            losses, flying = [], []
            for step in range(steps):
                at(worker, step)
                rows = select_rows(x, mine)
                if not pull:
                    storages["wide"].prefetch(rows, servers.step, True)
                loss = F.binary_cross_entropy_with_logits(net(rows, mine), y[mine], reduction="sum") / ROWS
                losses.append(float(loss.detach()))
                for one in (tables, rest):
                    one.zero_grad()
                loss.backward()
                settings = {key: value for key, value in tables.param_groups[0].items() if key != "params"}
                rules = {name: (tables.rule.name, settings) for name in storages}
                layers = [p for p in net.parameters() if p.numel()]
                weight = float(mine.numel()), float(ROWS)
                flying.append(send_step(servers, storages.values(), rules, weight, flat_gradients(layers)))
                if len(flying) > lag:
                    set_gradients([asked.result().tensors[0] for asked in flying.pop(0)], layers)
                else:
                    rest.zero_grad()
                for one in (tables, rest):
                    one.step()
            return losses, [storage.read(0, storage.table.rows) for storage in storages.values()]

    with ThreadPoolExecutor(workers) as pool:
        found = [job.result() for job in [pool.submit(work, worker) for worker in range(workers)]]
    return [sum(step) for step in zip(*(losses for losses, _ in found), strict=True)], found[0][1]


def tables_of(net: Net) -> list[Tensor]:
    return [net.wide.weight.detach(), net.ids.weight.detach()]


@pytest.mark.parametrize(
    ("workers", "shape", "kind", "pull"),
    [
        (1, (1, 1), RowwiseAdagrad, False),
        (3, (2, 1), RowwiseAdagrad, False),
        (2, (1, 3), LazyAdam, False),
        (3, (2, 2), Adagrad, False),
        (2, (3, 1), RowwiseAdagrad, True),
        (2, (2, 2), LazyAdam, True),
    ],
)
def test_workers_train_what_one_process_trains(
    services: Any, workers: int, shape: tuple[int, int], kind: Any, pull: bool
) -> None:
    expected, net = alone(kind)
    losses, rows = together(services(shape[0] * shape[1], workers), kind, shape, pull=pull)
    assert losses == pytest.approx(expected, rel=1e-12)
    for found, wanted in zip(rows, tables_of(net), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.fixture
def storages(
    services: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[tuple[int, int]], ServerTableStorage]]:
    """A table of float64 rows on new servers, whose pieces have a few rows."""
    monkeypatch.setattr("gtrain_ps.worker.served_table.PIECE_BYTES", 500)
    with ExitStack() as stack:

        def start(shape: tuple[int, int]) -> ServerTableStorage:
            count = shape[0] * shape[1]
            addresses = [f"ipc://{service.socket.getsockname()}" for service in services(count, 1)]
            clients = [
                stack.enter_context(Client(address, peer="a server", name="rank 0", timeout_seconds=LIMIT))
                for address in addresses
            ]
            table = SparseLinear(FEATURES, HIDDEN, sparse=True, dtype=torch.float64).table
            placement = Placement(FEATURES, HIDDEN, *shape, spreading_multiplier(FEATURES))
            servers = ParameterServers(clients, restartable=True)
            storage = ServerTableStorage("wide", table, placement, servers, torch.float64, torch.float64, False)
            storage.open()
            return storage

        yield start


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 2)])
def test_blocks_go_through_files_piece_by_piece(storages: Any, tmp_path: Path, shape: tuple[int, int]) -> None:
    storage = storages(shape)
    rows = torch.randn(FEATURES, HIDDEN, dtype=torch.float64)
    shuffled = torch.randperm(FEATURES)
    storage.write([(shuffled[:40], rows[shuffled[:40]]), (shuffled[40:], rows[shuffled[40:]])])
    torch.testing.assert_close(storage.read(3, FEATURES), rows[3:], rtol=0, atol=0)
    states = []
    for server in range(storage.placement.servers):
        block = storage.describe_block(server)
        assert block.rule is None and list(block.shapes) == ["rows"]
        height, width = block.shapes["rows"]
        states.append({name: torch.randn(height, width, dtype=torch.float64) for name in ("mean", "square")})
        states[-1]["step"] = torch.arange(height, dtype=torch.float64)
        storage.write_block(server, "lazy_adam", states[-1])
    write_blocks(tmp_path, {"wide": storage}, range(storage.placement.servers))
    found = read_blocks(tmp_path)["wide"]
    assert found.placement == storage.placement
    for server, state in enumerate(states):
        assert found.blocks[server].rule == "lazy_adam"
        for name, tensor in state.items():
            torch.testing.assert_close(found.blocks[server].tensors[name], tensor, rtol=0, atol=0)
    again = torch.full_like(rows, torch.nan)
    for ids, piece in read_table(tmp_path, "wide", storage.table).pieces():
        assert len(ids) < 10
        again[ids] = piece
    torch.testing.assert_close(again, rows, rtol=0, atol=0)
    for server, block in found.blocks.items():
        zeros = {name: torch.zeros_like(tensor) for name, tensor in block.tensors.items()}
        for tensors in (zeros, block.tensors):
            storage.write_block(server, block.rule, tensors)
            for name, tensor in tensors.items():
                torch.testing.assert_close(torch.cat(list(storage.read_block(server, name))), tensor, rtol=0, atol=0)
    (tmp_path / "parameter-0.json").unlink()
    with pytest.raises(CheckpointError, match="of the table wide|rows of the table wide"):
        read_table(tmp_path, "wide", storage.table)


@pytest.mark.parametrize("rule", [None, "adagrad"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 2)])
def test_a_checkpoint_has_the_rows_that_were_changed(
    storages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], rule: str | None
) -> None:
    monkeypatch.setattr("gtrain_ps.checkpoints.LEAST_BYTES", 1)
    storage = storages(shape)
    expected, ids = storage.read(0, FEATURES), torch.tensor([3, 4, 20, 77])
    expected[ids] = torch.randn(4, HIDDEN, dtype=torch.float64)
    accumulator = 0.5
    for server in range(storage.placement.servers):
        common = {"key": "wide", "step": 0, "begin": 0, "rule": rule}
        storage.servers.submit(server, "reset", {**common, "table": asdict(storage.table), "accumulator": accumulator})
    storage.write([(ids, expected[ids])])
    write_blocks(tmp_path, {"wide": storage}, range(storage.placement.servers))
    saved = read_blocks(tmp_path)["wide"]
    stored = {server: len(block.tensors["rows"]) for server, block in saved.blocks.items()}
    assert sum(stored.values()) == 4 * shape[1]
    assert all(block.initial is not None for block in saved.blocks.values())
    again = torch.full_like(expected, torch.nan)
    for chosen, piece in read_table(tmp_path, "wide", storage.table).pieces():
        again[chosen] = piece
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    # Rows and state that were trained since are reset.
    everything = torch.arange(FEATURES)
    storage.write([(everything, torch.zeros(FEATURES, HIDDEN, dtype=torch.float64))])
    for server, block in saved.blocks.items():
        if rule is not None:
            shapes = storage.describe_block(server).shapes
            storage.write_block(server, rule, {"sum": torch.full(shapes["sum"], 9, dtype=torch.float64)})
        storage.write_block(server, block.rule, block.tensors, block.positions, block.initial)
        description = storage.describe_block(server)
        assert (description.rule, description.changed) == (rule, stored[server])
        if rule is not None:
            assert bool((torch.cat(list(storage.read_block(server, "sum"))) == accumulator).all())
    torch.testing.assert_close(storage.read(0, FEATURES), expected, rtol=0, atol=0)


def test_a_server_that_ends_while_its_block_is_read_goes_on(services: Any, storages: Any) -> None:
    storage = storages((1, 1))
    rows = storage.read(0, FEATURES)
    pieces = storage.read_block(0, "rows")
    first = next(pieces)
    (started,) = services(0, 1)
    started.restart()
    torch.testing.assert_close(torch.cat([first, *pieces])[storage.placement.locate(torch.arange(FEATURES))[1]], rows)


def test_a_checkpoint_of_an_earlier_version_is_read(storages: Any, tmp_path: Path) -> None:
    """Its blocks are in the workers' states."""
    storage = storages((2, 1))
    blocks = [{"rule": None, "tensors": {"rows": torch.cat(list(storage.read_block(n, "rows")))}} for n in range(2)]
    for worker, block in enumerate(blocks):
        entry = {"placement": storage.placement.fields(), "servers": {str(worker): block}}
        torch.save({"rng": {}, "shard": {"wide": entry, "@meters": {}}}, tmp_path / f"rank-{worker}.pt")
    found = torch.empty(FEATURES, HIDDEN, dtype=torch.float64)
    for ids, piece in read_table(tmp_path, "wide", storage.table).pieces():
        found[ids] = piece
    torch.testing.assert_close(found, storage.read(0, FEATURES), rtol=0, atol=0)


@pytest.mark.parametrize(("lag", "disk"), [(0, 0), (2, 0), (0, 1 << 30), (0, 20_000)])
def test_servers_that_end_at_any_step_lose_nothing(services: Any, lag: int, disk: int) -> None:
    """Servers forget all but their memory, or disk, some while the workers are between their requests."""
    started = services(2, 2, lag, disk)

    def at(worker: int, step: int) -> None:
        if step in (2, 5, 9) and worker == step % 2:
            started[step % 2].restart()

    steps = 12
    losses, rows = together(started, RowwiseAdagrad, (2, 1), lag=lag, steps=steps, at=at)
    assert [service.engine.version for service in started] == [steps, steps]
    if disk:
        logs = [path for service in started for path in service.folder.glob("log-*")]
        assert [log.name == "log-0" for log in logs] == [disk > 20_000] * 2  # one each, cut where they may not grow
    if lag:
        assert losses[-1] < losses[0]
        return
    expected, net = alone(RowwiseAdagrad, steps)
    assert losses == pytest.approx(expected, rel=1e-12)
    for found, wanted in zip(rows, tables_of(net), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_a_worker_gets_no_further_ahead_than_the_lag(services: Any) -> None:
    """Measured where it matters: how many steps the products of a step missed."""
    (service,) = services(1, 2, 2)
    ahead = threading.Event()

    def at(worker: int, step: int) -> None:
        if worker == 0 and step == 3:
            ahead.set()
        if worker == 1 and step == 1:
            assert ahead.wait(LIMIT)  # the other one continues meanwhile, as far as it may

    together([service], RowwiseAdagrad, (1, 1), lag=2, steps=8, at=at)
    products, missed = service.engine.missed
    assert products == 2 * 2 * 8 and 0 < missed <= 2 * products


def test_an_id_out_of_range_is_refused_before_it_is_sent(services: Any) -> None:
    (service,) = services(1, 1)
    with Client(f"ipc://{service.socket.getsockname()}", peer="parameter 0", name="rank 0") as client:
        layer = SparseLinear(FEATURES, HIDDEN)
        place = Placement(FEATURES, HIDDEN, 1, 1)
        storage = ServerTableStorage(
            "wide", layer.table, place, ParameterServers([client]), torch.float32, torch.float32, False
        )
        storage.open()
        layer.move(storage)
        with pytest.raises(DataError, match="the id 90 was looked up in the table wide, whose ids are 0 to 89"):
            layer((torch.tensor([3, 90]), None, torch.tensor([0, 2])))


def test_a_server_multiplies_each_product_once_and_updates_each_table_once(
    services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a pass over the entries of rows; a second one would cost as much again."""
    passes = Counter[str]()
    for name in ("multiply", "update"):
        original = getattr(Block, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            passes[name] += 1
            return original(*args)

        monkeypatch.setattr(Block, name, counted)
    workers, servers, tables = 3, 2, 2
    together(services(servers, workers), RowwiseAdagrad, (2, 1))
    reads = workers * servers * tables  # each worker reads all tables after the last step
    assert passes == {"multiply": STEPS * workers * servers * tables + reads, "update": STEPS * servers * tables}


def test_half_the_bytes_of_numbers_with_bfloat16(services: Any) -> None:
    (service,) = services(1, 1)
    with Client(f"ipc://{service.socket.getsockname()}", peer="parameter 0", name="rank 0") as client:
        table = SparseLinear(FEATURES, HIDDEN).table
        answers = {}
        for dtype in (torch.float32, torch.bfloat16):
            storage = ServerTableStorage(
                "wide",
                table,
                Placement(FEATURES, HIDDEN, 1, 1),
                ParameterServers([client]),
                torch.float32,
                dtype,
                False,
            )
            storage.open()
            layer = SparseLinear(FEATURES, HIDDEN)
            layer.move(storage)
            before = client.counters.bytes_received
            rows = select_rows(data()[0].float(), torch.arange(ROWS).repeat(100))
            answers[dtype] = layer(rows).detach(), client.counters.bytes_received - before
    (exact, full), (rounded, half) = answers.values()
    assert 0.5 < half / full < 0.51
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (2, 2)])
def test_bytes_of_a_step_are_within_a_twentieth_of_the_formula(services: Any, shape: tuple[int, int]) -> None:
    """Headers and all, for a step of 3 MB."""
    started, rows, width = services(4, 1), 1000, 64
    generator = torch.Generator().manual_seed(0)
    batch = Csr(
        torch.randint(0, 5000, (rows * 60,), generator=generator),
        torch.randn(rows * 60, generator=generator),
        torch.arange(0, rows * 60 + 1, 60),
    )
    with ExitStack() as stack:
        where = [f"ipc://{service.socket.getsockname()}" for service in started]
        clients = [stack.enter_context(Client(address, peer="parameter", name="rank 0")) for address in where]
        servers, layer = ParameterServers(clients, restartable=True), SparseLinear(5000, width)
        storage = ServerTableStorage(
            "wide", layer.table, Placement(5000, width, *shape), servers, *[torch.float32] * 2, False
        )
        storage.open()
        layer.move(storage)
        before = sum(client.counters.bytes_sent + client.counters.bytes_received for client in clients)
        layer(batch).sum().backward()
        for asked in send_step(servers, [storage], {"wide": ("sgd", {"lr": 0.1})}, (1.0, 1.0), torch.zeros(8)):
            asked.result()
        spent = sum(client.counters.bytes_sent + client.counters.bytes_received for client in clients) - before
    assert 1.0 < spent / Plan("ship", *shape).nbytes(Load(rows * 60, 0, rows), width, 4, 4) < 1.05


def test_a_batch_that_was_sent_ahead_and_discarded_is_not_mistaken_for_the_one_of_its_step() -> None:
    """The server may have multiplied and grouped its rows, and returns the other product to a worker that restarts."""
    engine = Engine(1, 0, ServerMemory(), replay=True)
    block = engine.blocks["t"] = Block("t", 6, 2, torch.float32, engine.memory)
    block.table[:] = torch.arange(6.0)[:, None]

    def request(ids: list[int]) -> ProductRequest:
        tensors = [torch.tensor(ids, dtype=torch.int32)]
        return ProductRequest(0, 0, 0, block, block.rows(tensors[0], None, None), torch.float32, Message({}, tensors))

    rules = {"t": ("sgd", {"lr": 1.0, "weight_decay": 0.0})}
    for ids in ([2, 3], [4, 5]):  # the second batch is the step's
        engine.multiply(request(ids))
        engine.drain()
    engine.commit(Commit(0, 0, 1.0, 1.0, [0], [torch.ones(2, 2)], rules, None, {}, Message({})))
    engine.drain()
    assert block.table[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 3.0, 4.0]
    reply = engine.multiply(request([4, 5])).result()
    assert reply is not None and reply.tensors[0][:, 0].tolist() == [4.0, 5.0]


@pytest.fixture
def layer_of_one(services: Any) -> Iterator[Callable[[Limits], tuple[SparseLinear, ServerTableStorage]]]:
    """A wide layer whose table is on one server, for a worker with these limits."""
    with ExitStack() as stack:

        def start(limits: Limits = Limits()) -> tuple[SparseLinear, ServerTableStorage]:  # noqa: B008 (it is frozen)
            (service,) = services(1, 1)
            address = f"ipc://{service.socket.getsockname()}"
            client = Client(address, peer="parameter 0", name="rank 0", limits=limits, timeout_seconds=LIMIT / 4)
            layer = SparseLinear(FEATURES, HIDDEN, sparse=True, dtype=torch.float64)
            servers = ParameterServers([stack.enter_context(client)])
            place = Placement(FEATURES, HIDDEN, 1, 1)
            storage = ServerTableStorage("wide", layer.table, place, servers, torch.float64, torch.float64, False)
            storage.open()
            layer.move(storage)
            return layer, storage

        yield start


def train_step(layer: SparseLinear, storage: ServerTableStorage, rows: Csr) -> None:
    """Train a step."""
    layer(rows).sum().backward()
    rules = {"wide": ("sgd", {"lr": 0.1, "weight_decay": 0.0})}
    for request in send_step(storage.servers, [storage], rules, (1.0, 1.0), None):
        request.result()


def test_products_are_numbered_alike_with_and_without_discarded_batches(layer_of_one: Any) -> None:
    """A restarted worker sends only the batches of its steps, and asks for products by their numbers."""
    layer, storage = layer_of_one()
    x, _ = data()
    first, discarded, checked, second = (select_rows(x, torch.arange(n, n + 6)) for n in (0, 6, 12, 18))
    for number, rows in enumerate((first, discarded)):
        storage.prefetch(rows, number, True)
    storage.prefetch(checked, 0, False)
    storage.discard_prefetched(False)  # at the end of a validation between the steps
    train_step(layer, storage, first)
    storage.discard_prefetched(True)
    storage.servers.restart_calls()
    storage.prefetch(second, 1, True)
    _, pending = storage.multiply(second)
    assert (pending.step, pending.call) == (1, 0)


def test_rows_that_are_sent_ahead_leave_room_for_the_steps_before(layer_of_one: Any) -> None:
    """Their products follow these steps, so none of them may wait for the others' room."""
    x, _ = data()
    batches = [select_rows(x, torch.arange(ROWS)) for _ in range(12)]
    layer, storage = layer_of_one(Limits(max_bytes_in_flight=24_000))
    table = storage.read(0, FEATURES)
    for number, rows in enumerate(batches):
        storage.prefetch(rows, number, True)
    pending = storage.servers.clients[0]._session.pending
    assert 0 < pending.nbytes <= 6_000 and len(pending.requests) < 12
    for rows in batches:
        train_step(layer, storage, rows)
    assert storage.servers.step == 12
    expected = table - 12 * 0.1 * x.to_dense().sum(0)[:, None]
    torch.testing.assert_close(storage.read(0, FEATURES), expected, rtol=1e-12, atol=1e-13)


def test_rows_that_are_sent_ahead_can_be_withdrawn(layer_of_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps, for a validation or a checkpoint, whose requests exceed those above an unanswered one."""
    monkeypatch.setattr("gtrain.wire.pending.MAX_ACKNOWLEDGED", 64)
    x, _ = data()
    *batches, late = (select_rows(x, torch.arange(number, number + 6)) for number in (0, 6, 12, 18))
    layer, storage = layer_of_one()
    table = storage.read(0, FEATURES)
    for number, rows in enumerate(batches):
        storage.prefetch(rows, number, True)
    train_step(layer, storage, batches[0])
    pending = storage.servers.clients[0]._session.pending
    assert storage.has_prefetched and pending.requests
    storage.servers.hold()
    storage.servers.withdraw()
    storage.withdraw()
    storage.prefetch(late, 3, True)  # by the thread that builds batches
    for _ in range(100):
        storage.read(0, 1)
    assert not pending.requests
    storage.servers.go_ahead()
    for rows in (*batches[1:], late):
        train_step(layer, storage, rows)
    expected = table - 0.1 * x.to_dense().sum(0)[:, None]
    torch.testing.assert_close(storage.read(0, FEATURES), expected, rtol=1e-12, atol=1e-13)


def test_a_step_larger_than_the_limit_is_sent_beside_rows_that_are_sent_ahead(layer_of_one: Any) -> None:
    x, _ = data()
    batches = [select_rows(x, torch.arange(ROWS)) for _ in range(2)]
    entries = len(batches[0].ids) * 12 + ROWS * 2
    layer, storage = layer_of_one(Limits(max_bytes_in_flight=8 * (entries + 400)))
    for number, rows in enumerate(batches):
        storage.prefetch(rows, number, True)
    client = storage.servers.clients[0]
    storage.multiply(batches[0])
    assert len(client._session.pending.requests) == 1  # the second batch's
    large = torch.zeros(9 * (entries + 400), dtype=torch.uint8)
    fields = {"step": 0, "weight": 1.0, "scale": 1.0, "rules": "{}", "calls": [], "kept": ["step"]}
    storage.servers.submit(0, "commit", fields, [large]).result()

"""Modules that have moved since release 0.1.0: importing an old path gives the new module, with a warning.

Users' programs, the ``_target_`` of their configurations and stored runs name modules by path. The old paths work for
one release. Light: imports the standard library alone.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "gtrain.build": "gtrain.run.build",
    "gtrain.callbacks.formats": "gtrain.callbacks.predictions",
    "gtrain.cli.command": "gtrain.cli.entry",
    "gtrain.data.biggraph": "gtrain.data.sources.biggraph",
    "gtrain.data.biggraph_bags": "gtrain.data.readers.biggraph",
    "gtrain.data.biggraph_edges": "gtrain.data.readers.biggraph",
    "gtrain.data.biggraph_files": "gtrain.data.readers.biggraph",
    "gtrain.data.components": "gtrain.data.sources.pyg",
    "gtrain.data.dgl_book": "gtrain.data.readers.dgl",
    "gtrain.data.dgl_files": "gtrain.data.readers.dgl",
    "gtrain.data.dgl_partition": "gtrain.data.sources.dgl_partition",
    "gtrain.data.edge_order": "gtrain.data.prepare.graph",
    "gtrain.data.edge_seeds": "gtrain.data.batches.edge_seeds",
    "gtrain.data.edge_sets": "gtrain.data.readers.files",
    "gtrain.data.edges": "gtrain.data.sources.edges",
    "gtrain.data.entities": "gtrain.data.sources.entities",
    "gtrain.data.entity_features": "gtrain.data.readers.entities",
    "gtrain.data.entity_names": "gtrain.data.readers.entities",
    "gtrain.data.events": "gtrain.data.sources.temporal",
    "gtrain.data.extras": "gtrain.data.readers.files",
    "gtrain.data.files": "gtrain.data.readers.files",
    "gtrain.data.given_parts": "gtrain.data.sources.prepartitioned",
    "gtrain.data.hashing": "gtrain.data.readers.parquet",
    "gtrain.data.heco": "gtrain.data.sources.heco",
    "gtrain.data.heco_files": "gtrain.data.sources.heco",
    "gtrain.data.ingest.layout": "gtrain.data.ingest.format",
    "gtrain.data.ingest.named": "gtrain.data.readers.number_table",
    "gtrain.data.ingest.probe": "gtrain.data.ingest.dictionary",
    "gtrain.data.ingest.rows": "gtrain.data.ingest.dictionary",
    "gtrain.data.ingest.text": "gtrain.data.ingest.lines",
    "gtrain.data.kg": "gtrain.data.sources.kg",
    "gtrain.data.libsvm": "gtrain.data.sources.libsvm",
    "gtrain.data.libsvm_file": "gtrain.data.sources.libsvm",
    "gtrain.data.loader": "gtrain.data.batches.loader",
    "gtrain.data.musae": "gtrain.data.sources.musae",
    "gtrain.data.negatives": "gtrain.data.batches.negatives",
    "gtrain.data.node_files": "gtrain.data.readers.node_files",
    "gtrain.data.ogb": "gtrain.data.sources.ogb",
    "gtrain.data.ogb_files": "gtrain.data.sources.ogb",
    "gtrain.data.pairs": "gtrain.data.planted.pairs",
    "gtrain.data.pairs_between": "gtrain.data.planted.pairs",
    "gtrain.data.parquet": "gtrain.data.sources.parquet",
    "gtrain.data.parquet_columns": "gtrain.data.readers.parquet",
    "gtrain.data.parquet_files": "gtrain.data.readers.parquet",
    "gtrain.data.parquet_labels": "gtrain.data.readers.parquet",
    "gtrain.data.part_edges": "gtrain.data.batches.part_edges",
    "gtrain.data.planted_common": "gtrain.data.planted.common",
    "gtrain.data.planted_hetero": "gtrain.data.planted.hetero",
    "gtrain.data.planted_kg": "gtrain.data.planted.kg",
    "gtrain.data.planted_sparse": "gtrain.data.planted.sparse",
    "gtrain.data.planted_temporal": "gtrain.data.planted.temporal",
    "gtrain.data.prepare.components": "gtrain.data.sources.pyg",
    "gtrain.data.prepare_arrays": "gtrain.data.prepare.graph",
    "gtrain.data.pyg": "gtrain.data.sources.pyg",
    "gtrain.data.pyg_graph": "gtrain.data.readers.pyg",
    "gtrain.data.pyg_partition": "gtrain.data.sources.pyg_partition",
    "gtrain.data.pyg_partition_files": "gtrain.data.sources.pyg_partition",
    "gtrain.data.raw": "gtrain.data.readers.pyg",
    "gtrain.data.rdf": "gtrain.data.sources.entities",
    "gtrain.data.readers.edge_sets": "gtrain.data.readers.files",
    "gtrain.data.readers.events": "gtrain.data.sources.temporal",
    "gtrain.data.readers.extras": "gtrain.data.readers.files",
    "gtrain.data.readers.heco": "gtrain.data.sources.heco",
    "gtrain.data.readers.libsvm": "gtrain.data.sources.libsvm",
    "gtrain.data.readers.ogb": "gtrain.data.sources.ogb",
    "gtrain.data.readers.pyg_partition": "gtrain.data.sources.pyg_partition",
    "gtrain.data.readers.rdf": "gtrain.data.sources.entities",
    "gtrain.data.rows": "gtrain.data.sources.feature_rows",
    "gtrain.data.sampling": "gtrain.data.batches.sampling",
    "gtrain.data.scored_edges": "gtrain.data.batches.scored_edges",
    "gtrain.data.sources.given_parts": "gtrain.data.sources.prepartitioned",
    "gtrain.data.split": "gtrain.data.prepare.split",
    "gtrain.data.split_edges": "gtrain.data.prepare.split_edges",
    "gtrain.data.table": "gtrain.data.readers.number_table",
    "gtrain.data.temporal": "gtrain.data.sources.temporal",
    "gtrain.data.triples": "gtrain.data.readers.triples",
    "gtrain.data.typed_edges": "gtrain.data.prepare.typed_edges",
    "gtrain.data.unpickling": "gtrain.data.readers.unpickling",
    "gtrain.data.validate": "gtrain.data.prepare.validate",
    "gtrain.data.validate_edges": "gtrain.data.prepare.validate",
    "gtrain.doctor.findings": "gtrain.doctor.report",
    "gtrain.graph.buckets": "gtrain.graph.store.edges",
    "gtrain.graph.columns": "gtrain.graph.store.edges",
    "gtrain.graph.csc": "gtrain.graph.store.csc",
    "gtrain.graph.entities": "gtrain.graph.store.entities",
    "gtrain.graph.files": "gtrain.graph.store.files",
    "gtrain.graph.global_ids": "gtrain.graph.store.numbering",
    "gtrain.graph.hetero_shard": "gtrain.graph.shard.graph",
    "gtrain.graph.ingest.blocks": "gtrain.data.ingest.blocks",
    "gtrain.graph.ingest.columns": "gtrain.data.ingest.columns",
    "gtrain.graph.ingest.dictionary": "gtrain.data.ingest.dictionary",
    "gtrain.graph.ingest.edge_list": "gtrain.data.ingest.edge_list",
    "gtrain.graph.ingest.format": "gtrain.data.ingest.format",
    "gtrain.graph.ingest.layout": "gtrain.data.ingest.format",
    "gtrain.graph.ingest.lines": "gtrain.data.ingest.lines",
    "gtrain.graph.ingest.load8": "gtrain.kernels.memory",
    "gtrain.graph.ingest.named": "gtrain.data.readers.number_table",
    "gtrain.graph.ingest.parquet": "gtrain.data.ingest.parquet",
    "gtrain.graph.ingest.probe": "gtrain.data.ingest.dictionary",
    "gtrain.graph.ingest.progress": "gtrain.data.ingest.edge_list",
    "gtrain.graph.ingest.rows": "gtrain.data.ingest.dictionary",
    "gtrain.graph.ingest.scan": "gtrain.data.ingest.dictionary",
    "gtrain.graph.ingest.text": "gtrain.data.ingest.lines",
    "gtrain.graph.locality": "gtrain.graph.partition.metis",
    "gtrain.graph.lock": "gtrain.graph.store.lock",
    "gtrain.graph.manifest": "gtrain.graph.store.manifest",
    "gtrain.graph.metis": "gtrain.graph.partition.metis",
    "gtrain.graph.mixing": "gtrain.kernels.splitmix",
    "gtrain.graph.names": "gtrain.graph.store.names",
    "gtrain.graph.numbering": "gtrain.graph.store.numbering",
    "gtrain.graph.partition.locality": "gtrain.graph.partition.metis",
    "gtrain.graph.partition.streaming": "gtrain.graph.partition.methods",
    "gtrain.graph.prefetch": "gtrain.kernels.memory",
    "gtrain.graph.quality": "gtrain.graph.store.writer",
    "gtrain.graph.rows": "gtrain.graph.store.writer",
    "gtrain.graph.sampling.hetero": "gtrain.graph.sampling.sampler",
    "gtrain.graph.sampling.random": "gtrain.kernels.random",
    "gtrain.graph.sampling.rules": "gtrain.graph.sampling.hop",
    "gtrain.graph.shard.hetero": "gtrain.graph.shard.graph",
    "gtrain.graph.shard_nodes": "gtrain.graph.shard.nodes",
    "gtrain.graph.streaming": "gtrain.graph.partition.methods",
    "gtrain.graph.tables": "gtrain.graph.store.tables",
    "gtrain.graph.whole": "gtrain.graph.shard.whole",
    "gtrain.graph.writer": "gtrain.graph.store.writer",
    "gtrain.kernel_turns": "gtrain.kernel_cache",
    "gtrain.launch.blame": "gtrain.launch.agent",
    "gtrain.launch.cluster": "gtrain.launch.launchers",
    "gtrain.launch.command": "gtrain.cli.entry",
    "gtrain.launch.meeting": "gtrain.launch.rendezvous",
    "gtrain.launch.roles": "gtrain.launch.job",
    "gtrain.metrics": "gtrain.model.metrics",
    "gtrain.model.auc": "gtrain.model.edge_model",
    "gtrain.model.comparators": "gtrain.model.kg.scores",
    "gtrain.model.configured": "gtrain.model.module",
    "gtrain.model.edge_scores": "gtrain.model.kg.scores",
    "gtrain.model.kg.comparators": "gtrain.model.kg.scores",
    "gtrain.model.kg.groups": "gtrain.model.kg.training",
    "gtrain.model.kg.negatives": "gtrain.model.kg.training",
    "gtrain.model.kg.operators": "gtrain.model.kg.scores",
    "gtrain.model.kg_embedding": "gtrain.model.kg.embedding",
    "gtrain.model.kg_evaluation": "gtrain.model.kg.evaluation",
    "gtrain.model.kg_groups": "gtrain.model.kg.training",
    "gtrain.model.kg_losses": "gtrain.model.kg.training",
    "gtrain.model.kg_ranking": "gtrain.model.kg.evaluation",
    "gtrain.model.kg_schema": "gtrain.model.kg.schema",
    "gtrain.model.kg_tables": "gtrain.model.kg.tables",
    "gtrain.model.kg_training": "gtrain.model.kg.training",
    "gtrain.model.mean_loss": "gtrain.model.module",
    "gtrain.model.negatives": "gtrain.model.kg.training",
    "gtrain.model.node_classifier": "gtrain.model.classification",
    "gtrain.model.operators": "gtrain.model.kg.scores",
    "gtrain.model.optimizers": "gtrain.model.module",
    "gtrain.model.ranking": "gtrain.model.edge_model",
    "gtrain.model.sparse_classifier": "gtrain.model.classification",
    "gtrain.model.spread": "gtrain.model.edge_model",
    "gtrain.model.table_optimizer": "gtrain.model.module",
    "gtrain.model.trim": "gtrain.model.inputs",
    "gtrain.nn.layers": "gtrain.nn.table",
    "gtrain.nn.product": "gtrain.nn.csr",
    "gtrain.preflight": "gtrain.run.preflight",
    "gtrain.profiler": "gtrain.run.build",
    "gtrain.report": "gtrain.run.report",
    "gtrain.runs": "gtrain.run.runs",
    "gtrain.strategy.by_hand": "gtrain.launch.joining",
    "gtrain.strategy.collectives": "gtrain.strategy.base",
    "gtrain.strategy.forming": "gtrain.strategy.group",
    "gtrain.strategy.heap": "gtrain.memory.heap",
    "gtrain.strategy.key_value": "gtrain.launch.key_value",
    "gtrain.strategy.rendezvous": "gtrain.launch.job_store",
    "gtrain.strategy.settings_check": "gtrain.launch.settings_check",
    "gtrain.strategy.statistics": "gtrain.strategy.gradients",
    "gtrain.strategy.stopping": "gtrain.launch.children",
    "gtrain.task": "gtrain.run.task",
    "gtrain.wire.answers": "gtrain.wire.server_session",
    "gtrain.wire.dialogue": "gtrain.wire.client_session",
    "gtrain.wire.failures": "gtrain.wire.pending",
    "gtrain.wire.io_threads": "gtrain.wire.zeromq.sockets",
    "gtrain.wire.link": "gtrain.wire.zeromq.link",
    "gtrain.wire.listener": "gtrain.wire.zeromq.listener",
    "gtrain.wire.local_link": "gtrain.wire.unix.link",
    "gtrain.wire.local_listener": "gtrain.wire.unix.listener",
    "gtrain.wire.msgpack_check": "gtrain.wire.header",
    "gtrain.wire.outstanding": "gtrain.wire.pending",
    "gtrain.wire.security": "gtrain.wire.zeromq.security",
    "gtrain.wire.session": "gtrain.wire.server_session",
    "gtrain.wire.sockets": "gtrain.wire.zeromq.sockets",
    "gtrain.wire.stream": "gtrain.wire.unix.stream",
    "gtrain.wire.throttle": "gtrain.wire.logs",
    "gtrain.wire.transports": "gtrain.wire.transport",
    "gtrain.wire.zap": "gtrain.wire.zeromq.security",
    "gtrain.wire.zeromq.authenticator": "gtrain.wire.zeromq.security",
    "gtrain.wire.zeromq.refusals": "gtrain.wire.logs",
    "gtrain_pbg.checks": "gtrain_pbg.config",
    "gtrain_pbg.files": "gtrain_pbg.partition_store",
    "gtrain_pbg.kernels.bags": "gtrain_pbg.kernels.updates",
    "gtrain_pbg.kernels.factors": "gtrain_pbg.kernels.tiles",
    "gtrain_pbg.machines.group": "gtrain_pbg.machines.lock_client",
    "gtrain_pbg.machines.leased": "gtrain_pbg.machines.deployment",
    "gtrain_pbg.memory": "gtrain_pbg.training",
    "gtrain_pbg.optimizers": "gtrain_pbg.training",
    "gtrain_pbg.order": "gtrain_pbg.buckets",
    "gtrain_pbg.step.arithmetic": "gtrain_pbg.step.matmul_format",
    "gtrain_pbg.step.batch": "gtrain_pbg.step.layout",
    "gtrain_pbg.swaps": "gtrain_pbg.buckets",
    "gtrain_pbg.warm_start": "gtrain_pbg.checkpoints",
    "gtrain_pyg.batches": "gtrain_pyg.seeds",
    "gtrain_pyg.epoch": "gtrain_pyg.seeds",
    "gtrain_pyg.features.server": "gtrain_pyg.features.tables",
    "gtrain_pyg.links": "gtrain_pyg.seeds",
    "gtrain_pyg.pipeline": "gtrain_pyg.loader",
    "gtrain_pyg.pyg_sampler": "gtrain_pyg.pyg_loaders",
    "gtrain_pyg.ranks.hosting": "gtrain_pyg.peers",
    "gtrain_pyg.ranks.parts": "gtrain_pyg.peers",
    "gtrain_pyg.ranks.service": "gtrain_pyg.peers",
    "gtrain_pyg.ranks.sharing": "gtrain_pyg.peers",
    "gtrain_pyg.sampling.remote": "gtrain_pyg.sampling.hop",
    "gtrain_pyg.sampling.subgraph": "gtrain_pyg.sampling.sampler",
    "gtrain_pyg.shard": "gtrain_pyg.strategy",
    "gtrain_pyg.stores": "gtrain_pyg.pyg_loaders",
    "gtrain_pyg.structure.degrees": "gtrain_pyg.norm",
    "gtrain_pyg.structure.hosted": "gtrain_pyg.graph_structure",
    "gtrain_pyg.structure.needs": "gtrain_pyg.graph_structure",
    "gtrain_pyg.structure.replica": "gtrain_pyg.graph_structure",
    "gtrain_sar.attention": "gtrain.engine.attention",
    "gtrain_sar.attention.fused": "gtrain.engine.attention.fused",
    "gtrain_sar.attention.gat": "gtrain.engine.fused_layers",
    "gtrain_sar.attention.readers": "gtrain.engine.attention.fused",
    "gtrain_sar.attention.softmax": "gtrain.engine.attention.softmax",
    "gtrain_sar.autograd": "gtrain.engine.propagate_call",
    "gtrain_sar.blocks": "gtrain.engine.blocks",
    "gtrain_sar.constants": "gtrain.engine.constants",
    "gtrain_sar.dgl.functions": "gtrain_sar.dgl.edge_values",
    "gtrain_sar.dgl.index": "gtrain_sar.dgl.graph",
    "gtrain_sar.edges": "gtrain.engine.edges",
    "gtrain_sar.extremes": "gtrain.engine.blocks",
    "gtrain_sar.fused_layers": "gtrain.engine.fused_layers",
    "gtrain_sar.halo": "gtrain.engine.halo",
    "gtrain_sar.kernels": "gtrain.engine.kernels",
    "gtrain_sar.kernels.attention": "gtrain.engine.kernels.attention",
    "gtrain_sar.kernels.extreme": "gtrain.engine.kernels.sums",
    "gtrain_sar.kernels.lanes": "gtrain.engine.kernels.rows",
    "gtrain_sar.kernels.linear": "gtrain.engine.kernels.sums",
    "gtrain_sar.kernels.plain": "gtrain.engine.kernels.plain",
    "gtrain_sar.kernels.rows": "gtrain.engine.kernels.rows",
    "gtrain_sar.kernels.sums": "gtrain.engine.kernels.sums",
    "gtrain_sar.kernels.threads": "gtrain.engine.kernels.threads",
    "gtrain_sar.linear": "gtrain.engine.linear",
    "gtrain_sar.linear_form": "gtrain.engine.propagate_call",
    "gtrain_sar.normalize": "gtrain.engine.normalize",
    "gtrain_sar.point_to_point": "gtrain.engine.halo",
    "gtrain_sar.propagate": "gtrain.engine.propagate",
    "gtrain_sar.propagate_call": "gtrain.engine.propagate_call",
    "gtrain_sar.relational": "gtrain_sar.patching",
    "gtrain_sar.sage": "gtrain.engine.fused_layers",
    "gtrain_sar.transform": "gtrain.engine.propagate",
    "gtrain_sar.typed.layer": "gtrain_sar.hetero",
    "gtrain_sar.typed.patching": "gtrain_sar.hetero",
    "gtrain_sar.typed.relations": "gtrain_sar.hetero",
}
"""New path by old path."""


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module some of whose names have new ones; an old name warns.

    Args:
        module: the module's ``__name__``.
        names: new name by old name.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        message = f"{module}.{name} is now {module}.{names[name]}; the old name works until the next release"
        warnings.warn(message, FutureWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return get


class _Alias(ModuleType):
    """Stands at the old path and hands on the names of the module at the new one."""

    def __getattr__(self, name: str) -> Any:
        # With the new folder's path, importlib would load its files a second time under the old names.
        if name == "__path__":
            raise AttributeError(name)
        return getattr(importlib.import_module(MOVED[self.__name__]), name)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(MOVED[self.__name__]))


class MovedModules(MetaPathFinder, Loader):
    """Finds modules of :data:`MOVED`; stands last in ``sys.meta_path``, so a module with a file comes first."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec if the module has moved."""
        is_room = any(old.startswith(f"{name}.") for old in MOVED)
        return ModuleSpec(name, self, is_package=is_room) if name in MOVED or is_room else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty stand-in."""
        return _Alias(spec.name) if spec.name in MOVED else ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Warn, and import the module at its new path."""
        new = MOVED.get(module.__name__)
        if new is not None:
            message = f"{module.__name__} has moved to {new}; the old path works until the next release"
            warnings.warn(message, FutureWarning, stacklevel=2)
            importlib.import_module(new)

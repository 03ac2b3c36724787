"""The layer engine: compiled message passing for unmodified convolutions of PyG, over any blocks of edges.

Strategies share it. ``single``, ``ps`` and ``pyg`` run it on the edges of one process; ``sar`` on blocks of edges whose
sources other ranks own.
"""

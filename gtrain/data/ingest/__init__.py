"""Out-of-core ingest: edge lists larger than memory, by blocks.

``blocks`` reads text in pieces that end where a line ends, ``layout`` finds out from the first line what the columns
are, ``text`` and ``parquet`` turn pieces into :class:`~gtrain.data.ingest.rows.Rows`, ``dictionary`` numbers strings,
``columns`` keeps what may be larger than memory, and ``edge_list`` puts it together. ``probe`` has the
kernels of the dictionary. Nothing here is imported before a graph is read: numba compiles, and agents fork.
"""

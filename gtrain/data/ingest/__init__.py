"""Out-of-core ingest: read edge lists larger than memory, block by block.

``blocks`` reads text in blocks of whole lines, ``format`` has the user's settings and detects the columns from the
first line, ``lines`` and ``parquet`` parse the edges into :class:`~gtrain.data.ingest.dictionary.EdgeRows`,
``dictionary`` numbers strings, ``columns`` spills columns to disk, and ``edge_list`` combines the steps. Import these
modules only where a graph is read: numba compiles its kernels on the first call, and agents fork before that.
"""

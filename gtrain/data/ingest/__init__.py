"""Out-of-core ingest: read edge lists larger than memory, block by block.

``blocks`` reads text in blocks of whole lines, ``layout`` detects the columns from the first line, ``lines`` and
``parquet`` parse the edges into :class:`~gtrain.data.ingest.rows.EdgeRows`, ``dictionary`` numbers strings,
``columns`` spills columns to disk, and ``edge_list`` combines the steps. Import these modules only where a graph is
read: numba compiles its kernels on the first call, and agents fork before that.
"""

"""Building blocks of compiled loops, shared by the framework and the backends.

Ranks must import modules with compiled loops after the launcher's fork; only ``splitmix`` has none.

======================  ==================================================================
:mod:`.options`         compiler options
:mod:`.memory`          prefetching, unaligned loads, copies by address, a fence
:mod:`.exponential`     vectorized exponentials
:mod:`.random`          counter-based random numbers in compiled loops
:mod:`.splitmix`        the same with numpy alone
======================  ==================================================================

Each kernel of a backend is compiled on first use and cached on disk (:mod:`gtrain.kernel_cache`); a change of any file
of gtrain or of an installed backend invalidates the cache.
"""

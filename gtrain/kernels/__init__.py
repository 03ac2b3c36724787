"""What compiled loops of the framework and its backends share; imported by ranks, after the launcher's fork.

======================  ==================================================================
:mod:`.options`         compiler options
:mod:`.memory`          prefetching, unaligned loads, copies by address, a fence
:mod:`.exponential`     vectorized exponentials
:mod:`.splitmix`        counter-based random numbers
======================  ==================================================================

Each kernel of a backend is compiled on first use and cached on disk (:mod:`gtrain.kernel_cache`); a change of any file
of gtrain or of an installed backend invalidates the cache.
"""

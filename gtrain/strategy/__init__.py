"""Building blocks of strategies: the base class, the group of ranks and its collectives, checkpoints, servers."""

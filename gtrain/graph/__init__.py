"""The graph itself: how it is cut into parts, kept on disk, and opened as a shard."""

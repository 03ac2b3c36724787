"""DGL's convolutions over a shard. Imports nothing: DGL is loaded by the modules that need it."""

"""LightningModules and networks; none of them knows a strategy."""

"""What a strategy plugin builds on: the base class, the ranks' process group, checkpoints, loaders."""

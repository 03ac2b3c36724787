"""The training step: one batch of edges, forward, backward and update, by kernels and products of matrices."""

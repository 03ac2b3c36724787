"""Training on a GPU: partitions and batches on the device, and a training step of few kernels in a CUDA graph."""

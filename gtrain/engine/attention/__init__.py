"""Attention over blocks: fused for GAT, and of any convolution that calls ``softmax``."""

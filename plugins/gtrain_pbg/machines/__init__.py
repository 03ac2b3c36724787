"""Several machines: who trains which bucket, where partitions are meanwhile, and what all machines have in common."""

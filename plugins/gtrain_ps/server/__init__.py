"""Parameter servers: products, updates, the replay buffer for restarted workers, memory that outlives the process."""

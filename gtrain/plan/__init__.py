"""What a run will cost, before it starts: memory, bytes, disk and seconds of every strategy that serves the model."""

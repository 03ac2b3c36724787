"""What a worker does: batches, products and steps, and coming back after its death."""

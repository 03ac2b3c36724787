"""What a server does: products and updates, what it keeps for workers that come back, memory that outlives it."""

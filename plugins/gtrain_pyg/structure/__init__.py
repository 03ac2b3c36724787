"""The edges as sampling reads them: those that a rank hosts, and what it keeps of others'."""

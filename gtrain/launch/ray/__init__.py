"""Jobs on a Ray cluster, ``cluster=ray``: actors, the agents of their machines, and the driver."""

"""The job that a rank executes from a configuration, and the results of a run."""

"""What a rank does with a configuration, and the folder that a run leaves."""

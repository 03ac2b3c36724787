"""Data sets and file formats that a run can train on, one DataModule each."""

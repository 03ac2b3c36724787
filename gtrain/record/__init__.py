"""The record of a run: what its processes and its command write for `gtrain report`, and its reader."""

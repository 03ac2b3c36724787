"""Connections within a machine: plain Unix sockets."""

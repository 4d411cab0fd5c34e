"""Readers of request traces: each turns one published format into `reuse.trace` turns."""

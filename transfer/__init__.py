"""Moves and keeps bytes: the Store interface and its backends, the daemon, NIXL. No vLLM here."""

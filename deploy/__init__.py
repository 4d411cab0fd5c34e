"""The `backhaul` command: store daemon, engines on one machine, the multi-turn demonstration."""

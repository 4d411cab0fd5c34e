"""The embedded store: one daemon with a gRPC catalog and a NIXL-registered pool."""

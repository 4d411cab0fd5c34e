"""The reuse experiment: which ends are worth keeping, on real engines and in virtual time."""

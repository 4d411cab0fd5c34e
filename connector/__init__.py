"""The only package that imports vLLM: BackhaulConnector and its two halves."""

"""Stands where torchvision would: vLLM's Qwen3.5 module imports picture processors beside the text
model, and torch's CPU build has no torchvision that fits. Nothing of it runs for text."""

__version__ = "0.28.0"

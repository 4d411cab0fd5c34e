"""See the package."""

pil_to_tensor = None

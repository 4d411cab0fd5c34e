"""See the package."""

from enum import Enum

InterpolationMode = Enum(
    "InterpolationMode", "NEAREST NEAREST_EXACT BOX BILINEAR HAMMING BICUBIC LANCZOS"
)

"""See the package."""

ImageReadMode = decode_image = None

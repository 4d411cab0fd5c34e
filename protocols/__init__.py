"""What crosses a wire or names a thing: domain, checkpoint, layout, options, errors, proto.

Imports the standard library, protobuf and msgspec only: every other package leans on it.
"""

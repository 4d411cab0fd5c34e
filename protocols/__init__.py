"""What crosses a wire or names a thing: domain, checkpoint, layout, options, errors, the catalog's proto.

Imports the standard library, protobuf and msgspec only, so that every other package can lean on it.
"""

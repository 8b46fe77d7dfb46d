"""A KV cache of 8-bit integers: an example of a plugin that hfkv knows nothing about."""

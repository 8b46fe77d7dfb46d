"""Round-to-nearest weights for hfkv."""

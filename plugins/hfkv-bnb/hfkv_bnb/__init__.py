"""bitsandbytes for hfkv."""

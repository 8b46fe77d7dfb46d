"""Windows for hfkv: the newest tokens, with the first ones as attention sinks or without, and nothing in between."""

"""KIVI for hfkv: keys packed per channel, values per token, the newest tokens in full precision."""

"""Activation-aware weight quantization for hfkv."""

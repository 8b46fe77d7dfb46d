"""Assistants for hfkv: the same text in fewer forwards."""

"""Long English text that every Python has: the topics of its own help."""

from __future__ import annotations


def long_text() -> str:
    """The topics of `pydoc`, in sorted order: about 465,000 characters of prose about Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))

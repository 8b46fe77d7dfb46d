"""``python -m hfkv.cli`` is ``hfkv``."""

from . import main

main()

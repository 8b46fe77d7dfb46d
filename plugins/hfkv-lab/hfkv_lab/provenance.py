"""What a measurement was made with, for the head of a page."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

from hfkv import __version__


def made_with(model: PreTrainedModel, name: str, source: str) -> dict[str, str]:
    """The model, where it ran, the text, and the versions."""
    device = model.device.type
    return {
        "model": f"{name}, {str(model.dtype).removeprefix('torch.')}",
        "device": f"{device}, {torch.get_num_threads()} threads" if device == "cpu" else device,
        "text": source,
        "versions": f"hfkv {__version__}, transformers {transformers.__version__}, torch {torch.__version__}",
    }

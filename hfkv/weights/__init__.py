"""Weight quantization: one config, one module class for every backend, loaded and saved by transformers itself."""

from .linear import QuantizedLinear, WeightHandle
from .options import WeightOptions

__all__ = ["QuantizedLinear", "WeightHandle", "WeightOptions"]

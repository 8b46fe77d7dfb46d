"""What transformers calls to load and save quantized weights: ``from_pretrained``, ``save_pretrained``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from transformers.quantizers.base import HfQuantizer

from .config import WeightConfig, backend_class

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .plan import Plan


class HFKVWeightQuantizer(HfQuantizer):
    """Registered under ``quant_method="hfkv"``.

    A plain checkpoint: each weight is encoded as it arrives, so that one layer at most is there in full; where a
    backend looks at the whole model, all of it is loaded first. One of ours: the layers are swapped for empty quantized
    ones, and transformers fills their tensors.

    A saved checkpoint has one tensor more for each quantized layer, ``<layer>.weight`` of one byte: where hfkv is
    missing, transformers skips the quantization, and would leave the missing weights random. The byte has the wrong
    shape, which is an error there.
    """

    requires_calibration = False
    quantization_config: WeightConfig
    _plan: Plan | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raise ImportError where a backend's requirements are not installed."""
        backend_class(self.quantization_config.backend)

    def is_serializable(self) -> bool:
        """Always."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters can be: gradients flow through the layers, whose own weights stay."""
        return True

    # loading

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        from .plan import plan
        from .quantize import replace

        self._plan = plan(model, self.quantization_config)
        if not self.pre_quantized:
            return
        for name, (layer_class, options) in self._plan.targets.items():
            replace(model, name, layer_class.skeleton(model.get_submodule(name), options))  # type: ignore[arg-type]
        # the bytes that make a load without hfkv fail
        names = "|".join(map(re.escape, self._plan.targets))
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = {*ignored, rf"^(?:.*\.)?(?:{names})\.weight$"}

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether a weight of the checkpoint is to be encoded."""
        if self._plan is None or self.pre_quantized or self._plan.whole_model:
            return False
        name, _, last = param_name.rpartition(".")
        return last == "weight" and name in self._plan.targets and name not in self._plan.tied

    def get_quantize_ops(self) -> Any:
        """The operation that encodes one weight."""
        from .encode import Encode

        assert self._plan is not None
        return Encode(self._plan.targets)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        from .quantize import replace_all, resolved

        if self._plan is not None and not self.pre_quantized:
            replace_all(model, self._plan)
            self.quantization_config = resolved(self.quantization_config, self._plan)
            model.config.quantization_config = self.quantization_config
        return model

    # saving, and turning back

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What is saved: the stored tensors, and the bytes that make a load without hfkv fail."""
        import torch

        from .linear import QuantizedLinear

        state = dict(model.state_dict())
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                state[f"{name}.weight"] = torch.zeros(1, dtype=torch.uint8)
        return state, {}

    def _dequantize(self, model: PreTrainedModel, dtype: Any = None) -> PreTrainedModel:
        import torch

        from .quantize import restore_all

        # a config that was saved and loaded has the dtype's name
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        restore_all(model, model.dtype if dtype is None else dtype)
        return model

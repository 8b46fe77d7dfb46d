"""A Trainer whose loss is what a teacher says.

*Distilling the Knowledge in a Neural Network* (Hinton et al., 2015); *MiniLLM* (Gu et al., 2024) and *On-Policy
Distillation of Language Models* (Agarwal et al., 2024) for reverse divergences and the student's own texts.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from .cache_aware import CacheView, seeing
from .chunked import Sums, Teacher, chunked_loss
from .collator import IGNORED, DistillationCollator
from .config import DistillationConfig
from .head import OutputHead
from .layers import States, recorded
from .losses import TopK
from .matching import Matching
from .meter import Meter
from .on_policy import generated
from .preparation import prepared_teacher, stored_vocabulary
from .targets import Targets
from .teacher import ask, in_bfloat16
from .vocabulary import common_vocabulary

# what a batch may hold besides what the student's forward takes
_OURS = (
    "labels",
    "teacher_input_ids",
    "teacher_attention_mask",
    "teacher_labels",
    "teacher_indices",
    "teacher_log_probabilities",
)
# the name of the projections that matching learns, on the student while it is trained
_PROJECTIONS = "distillation_projections"


class DistillationTrainer(Trainer):
    """Trains a student towards a teacher; everything else is transformers' `Trainer`.

    Parameters
    ----------
    model
        The student: a causal language model, with adapters (PEFT) or without.
    teacher_model
        The teacher, on whatever device it is, quantized or not. Not needed for data with stored logits (`StoredLogits`)
        or with ``alpha=1``.
    args
        A `DistillationConfig`.
    teacher_processing_class
        The teacher's tokenizer, where it is not known to be ``processing_class``.
    **arguments
        Those of `Trainer`. The default collator is `DistillationCollator`.

    Raises
    ------
    ValueError
        Arguments that do not go together, or tokenizers that differ.
    NotImplementedError
        A model whose logits or layers are not understood.
    """

    config_class = DistillationConfig
    args: DistillationConfig

    def __init__(
        self,
        model: Any = None,
        teacher_model: PreTrainedModel | None = None,
        args: DistillationConfig | None = None,
        *,
        teacher_processing_class: Any = None,
        **arguments: Any,
    ) -> None:
        args = DistillationConfig(output_dir="tmp_trainer") if args is None else args
        if not isinstance(args, DistillationConfig):
            raise TypeError(f"args must be a DistillationConfig, got {type(args).__name__}")
        if arguments.get("compute_loss_func") is not None or args.label_smoothing_factor:
            raise ValueError("compute_loss_func and label_smoothing_factor would be ignored: leave them out")
        if args.torch_compile:
            raise NotImplementedError("torch_compile=True: the loss changes the model's forward, which is not compiled")
        tokenizer = arguments.get("processing_class")
        pad = getattr(tokenizer, "pad_token_id", None)
        self._collate = DistillationCollator(0 if pad is None else pad)
        if arguments.get("data_collator") is None:
            arguments["data_collator"] = self._collate
        super().__init__(model=model, args=args, **arguments)
        if args.n_gpu > 1:
            raise NotImplementedError(
                f"{args.n_gpu} GPUs in one process: nn.DataParallel cannot run this loss. Fix: accelerate launch, or "
                "CUDA_VISIBLE_DEVICES with one"
            )
        # the loss is divided by the targets of all accumulated batches, which count from the second token on
        self.model_accepts_loss_kwargs = True
        self._loss_shifts_labels = True
        self.teacher_model = prepared_teacher(teacher_model, self.model, args)
        self._head = OutputHead(self.model)
        self._teacher_head = None if self.teacher_model is None else OutputHead(self.teacher_model)
        self._vocabulary = (
            stored_vocabulary(self.train_dataset, self.eval_dataset, teacher_model, args.temperature, self._head.size)
            or self._head.size
        )
        if self._teacher_head is not None:
            self._vocabulary = common_vocabulary(
                self._head.size, self._teacher_head.size, tokenizer, teacher_processing_class
            )
        self._matching = self._make_matching()
        self._view = None
        if args.train_cache is not None:
            self._view = CacheView(self.model, args.train_cache, args.train_cache_config)
        self._trained, self._evaluated = Meter(), Meter()

    def _make_matching(self) -> Matching | None:
        args = self.args
        if not any(args.match_weights.values()):
            return None
        matching = Matching(self.model, self.teacher_model, args.match_weights, args.layer_map)
        if len(matching.projections) and not isinstance(self.model, PreTrainedModel):
            raise NotImplementedError(
                "teacher and student have states of different width, and the projections between them cannot be saved "
                f"with a {type(self.model).__name__}: match layers of one width, or train the model itself"
            )
        return matching

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        self._signature_columns = list({*self._signature_columns, *_OURS})

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; what matching learns stands on the student for as long."""
        self._trained.reset()
        with contextlib.ExitStack() as stack:
            if self.teacher_model is not None and self.args.bf16:
                stack.enter_context(in_bfloat16(self.teacher_model))
            if self._matching is not None:
                # optimizers, checkpoints and distributed training find it there
                self.model.add_module(_PROJECTIONS, self._matching)
                stack.callback(delattr, self.model, _PROJECTIONS)
            return super().train(*args, **kwargs)

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A step that sees a cache, where that is asked for: backward may compute layers again."""
        with self._seeing():
            return super().training_step(model, *args, **kwargs)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """The loss of a batch; its logits only where ``compute_metrics`` asks for them."""
        with self._seeing():
            return super().prediction_step(
                model, self._without_repeats(inputs), self.compute_metrics is None, ignore_keys
            )

    def _without_repeats(self, inputs: Any) -> Any:
        """The last batch without the rows that fill it up, so that every process has as many."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return inputs
        rows = len(inputs["labels"])
        repeats = torch.arange(rows) + rows * self.args.process_index >= state.remainder
        return {**inputs, "labels": inputs["labels"].masked_fill(repeats[:, None].to(inputs["labels"].device), IGNORED)}

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """What `Trainer` evaluates, with means per target: loss, divergence, cross-entropy, perplexity, top 1."""
        self._evaluated.reset()
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        measured = self._evaluated.results(self._reduce, with_teacher=self._has_teacher)
        # of the time that evaluation takes, Trainer tells more
        measured.pop("tokens_per_second", None)
        output.metrics.update({f"{prefix}_{name}": value for name, value in measured.items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """What `Trainer` logs, and what was measured since."""
        if "loss" in logs:
            measured = self._trained.results(self._reduce, with_teacher=self._has_teacher)
            self._trained.reset()
            logs = {**measured, **logs}
        super().log(logs, *args, **kwargs)

    def _reduce(self, sums: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(sums.to(self.accelerator.device), reduction="sum")

    @property
    def _has_teacher(self) -> bool:
        return self.args.objective.needs_teacher

    def _seeing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._view is None else seeing(self.model, self._view)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        """The batches of a step; some with responses of the student's, before their targets are counted."""
        samples, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not self.args.lmbda:
            return samples, count
        samples = [self._on_policy(inputs, number) for number, inputs in enumerate(samples)]
        return samples, self._get_num_items_in_batch(samples, device)

    def _on_policy(self, inputs: Mapping[str, Any], number: int) -> Mapping[str, Any]:
        args = self.args
        # of the step alone: a run that is resumed decides and samples as it would have
        dice = random.Random(f"{args.seed} {self.state.global_step} {number}")
        if dice.random() >= args.lmbda:
            return inputs
        if "teacher_input_ids" in inputs:
            raise ValueError("lmbda: the student's own responses have no second prompt; leave out teacher_input_ids")
        cache: dict[str, Any] = {}
        if args.cache_implementation is not None:
            cache = {"cache_implementation": args.cache_implementation, "cache_config": args.cache_config}
        return generated(
            self.accelerator.unwrap_model(self.model),
            inputs,
            self._collate,
            dice.randrange(2**31) + args.process_index,
            max_new_tokens=args.max_new_tokens,
            prompt_length=args.prompt_length,
            temperature=args.sampling_temperature,
            **cache,
        )

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of a batch, per target of all batches that are accumulated."""
        if "labels" not in inputs:
            raise ValueError(
                f"a batch has no labels, only {', '.join(inputs)}. Fix: the default collator, or one that makes them"
            )
        targets = Targets(inputs["labels"])
        outputs, sums = self._run_student(model, inputs, targets, *self._run_teacher(inputs, targets))
        (self._trained if model.training else self._evaluated).add(outputs["loss"], sums, len(targets))
        count = torch.as_tensor(len(targets) if num_items_in_batch is None else num_items_in_batch)
        # a step may have no target at all
        loss = outputs["loss"] / count.to(outputs["loss"].device).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            # gradients are averaged over processes, and the targets were counted over all of them
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())
        return (loss, outputs) if return_outputs else loss

    def _run_teacher(self, inputs: Mapping[str, Any], targets: Targets) -> tuple[Teacher | None, States, Targets]:
        """What the teacher says of the targets; its layers; and where the targets are in what it reads."""
        if "teacher_log_probabilities" in inputs:
            stored = TopK(*(targets.at(inputs[name]) for name in ("teacher_indices", "teacher_log_probabilities")))
            return stored.__getitem__, {}, targets
        if self.teacher_model is None or self._teacher_head is None:
            if self.args.objective.needs_teacher:
                raise ValueError(
                    f"alpha={self.args.alpha!r} needs a teacher. Fix: teacher_model=, data with stored logits "
                    "(StoredLogits), or alpha=1"
                )
            return None, {}, targets
        wanted = {} if self._matching is None else self._matching.wanted("teacher")
        # in the student's precision, its head too
        with self.accelerator.autocast():
            say, states, theirs = ask(self.teacher_model, self._teacher_head, inputs, targets, wanted)

        def say_alike(rows: slice) -> Any:
            with self.accelerator.autocast():
                return say(rows)

        return say_alike if self._has_teacher else None, states, theirs

    def _run_student(
        self, model: Any, inputs: Mapping[str, Any], targets: Targets, teacher: Teacher | None, states: States,
        theirs: Targets,
    ) -> tuple[Any, Sums]:  # fmt: skip
        """The student's outputs, whose loss is summed over the targets; what it is made of."""
        head, found = self._head, list[Any]()
        own = {name: value for name, value in inputs.items() if name not in _OURS}
        wanted = {} if self._matching is None else self._matching.wanted("student")

        def see(hidden_states: torch.Tensor, way: Any) -> None:
            sums = chunked_loss(
                targets.before(hidden_states),
                way,
                list(head.module.parameters()),
                targets.tokens,
                teacher,
                self.args.objective,
                chunk_size=self.args.logits_chunk_size,
                vocabulary=self._vocabulary,
                overwrite=head.forgets_logits,
            )
            matched = 0 if self._matching is None else self._matching(ours, states, targets, theirs)
            found.extend((sums, sums.loss + matched))

        def add_loss(module: Any, args: Any, outputs: Any) -> Any:
            outputs["loss"] = found[1]
            return outputs

        # inside the forward of whatever wraps the model: what shards or synchronises it sees the loss among its outputs
        handle = self.model.register_forward_hook(add_loss, prepend=True)
        keeps = not model.training and self.compute_metrics is not None
        try:
            with recorded(self.model, wanted) as ours, head.taken(see, keep_logits=keeps):
                outputs = model(**own, use_cache=False, return_dict=True)
        finally:
            handle.remove()
        return outputs, found[0]

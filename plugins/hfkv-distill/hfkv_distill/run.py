"""A whole run: measure the student, train it, measure again."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import TrainerCallback

from .budget import Budget
from .config import DistillationConfig
from .texts import Examples
from .trainer import DistillationTrainer
from .unfinished import Saving, Unfinished

OBJECTIVES = ("kl", "reverse-kl", "jsd", "ce")
# what each sets
_SETTINGS: dict[str, dict[str, float]] = {
    "kl": {},
    "reverse-kl": {"beta": 1.0},
    "jsd": {"beta": 0.5},
    "ce": {"alpha": 1.0},
}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a student is trained.

    Parameters
    ----------
    objective
        ``"kl"``, ``"reverse-kl"``, ``"jsd"`` (halfway) or ``"ce"``, the text's own tokens without the teacher.
    alpha
        Share of the text's own tokens beside a divergence.
    minutes, steps
        How long: one of them.
    cache, cache_config
        A quantized cache that the student is measured through, and sees in training unless ``train_plain``.
    """

    objective: str = "kl"
    alpha: float = 0.0
    temperature: float = 1.0
    minutes: float | None = 15.0
    steps: int | None = None
    learning_rate: float = 5e-4
    batch_size: int = 4
    accumulation: int = 1
    cache: str | None = None
    cache_config: Mapping[str, Any] = field(default_factory=dict)
    train_plain: bool = False
    bf16: bool = False
    gradient_checkpointing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what would be ignored."""
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective={self.objective!r} is not there. Choose from: {', '.join(OBJECTIVES)}")
        if self.objective == "ce" and (self.alpha or self.temperature != 1):
            raise ValueError(
                f"objective='ce' has no teacher: alpha={self.alpha!r} and temperature={self.temperature!r}"
            )
        if self.train_plain and self.cache is None:
            raise ValueError("train_plain would be ignored: it is about a cache, and there is none")


@dataclass(frozen=True)
class Held:
    """A model on held-out text.

    Attributes
    ----------
    kl
        Forward KL from the teacher, in nats per token.
    top1
        Share of tokens for which both have the same favourite.
    perplexity
        Of the text.
    """

    kl: float
    top1: float
    perplexity: float


@dataclass(frozen=True)
class Point:
    """A step of a run: seconds of training, targets seen, and means since the step before that was logged."""

    seconds: float
    tokens: int
    loss: float
    kl: float | None
    ce: float


@dataclass(frozen=True)
class Result:
    """What a run brought.

    Attributes
    ----------
    teacher_perplexity
        Of the held-out text.
    curve
        Of the training text.
    """

    before: Held
    after: Held
    teacher_perplexity: float
    steps: int
    tokens: int
    seconds: float
    curve: Sequence[Point]

    @property
    def removed(self) -> float:
        """Share of the KL that is gone."""
        return 1 - self.after.kl / self.before.kl if self.before.kl else 0.0


class Curve(TrainerCallback):
    """Keeps what is logged, and shows it."""

    def __init__(self, budget: Budget, tokens_per_step: int, show: Callable[[Budget, Point, float], None]) -> None:
        self.points: list[Point] = []
        self._budget, self._tokens_per_step, self._show = budget, tokens_per_step, show

    def take_up(self, points: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the points of a run that was killed."""
        self.points = [Point(**point) for point in points]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Keep a step."""
        if "loss" not in logs:
            return
        tokens = state.global_step * self._tokens_per_step
        self.points.append(Point(self._budget.spent, tokens, logs["loss"], logs.get("kl"), logs["ce"]))
        self._show(self._budget, self.points[-1], logs["tokens_per_second"])


def distill(
    student: Any,
    teacher: Any,
    data: Examples,
    options: RunOptions,
    *,
    stage: Callable[[str], None] = lambda text: None,
    show: Callable[[Budget, Point, float], None] = lambda budget, point, speed: None,
    processing_class: Any = None,
    unfinished: Unfinished | None = None,
) -> Result:
    """Train a student in place, and say what it was and what it is on the held-out text.

    Parameters
    ----------
    stage
        Called with what is done now.
    show
        Called after each step, with the tokens per second.
    unfinished
        Where checkpoints are saved, and where a run that was killed left some: it goes on, with the models that it
        began with. None saves nothing.
    """
    budget = Budget(None if options.steps is not None else 60 * (options.minutes or 0), options.steps)
    length = len(data.train[0]["input_ids"])
    # the first token of a window has nothing before it
    curve = Curve(budget, options.batch_size * options.accumulation * (length - 1), show)
    callbacks: list[TrainerCallback] = [budget, curve]
    with contextlib.ExitStack() as stack:
        if unfinished is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hfkv-distill-"))
            checkpoint, known = None, None
        else:
            folder, checkpoint, known = str(unfinished.folder), unfinished.latest(), unfinished.measured()
            saving = Saving(unfinished, budget, curve)
            callbacks.append(saving)
            if checkpoint is not None:
                saving.take_up(checkpoint)
        if known is None:
            stage("measuring the student")
            held = measure(student, teacher, data.held_out, options, folder, processing_class)
            stage("measuring the teacher")
            alone = dataclasses.replace(
                options, objective="ce", alpha=0.0, temperature=1.0, cache=None, train_plain=False, bf16=False
            )
            reference = _trainer(teacher, None, data.held_out, alone, folder, processing_class)
            known = {"before": dataclasses.asdict(held), "teacher": reference.evaluate()["eval_perplexity"]}
            _release(teacher)
            if unfinished is not None:
                unfinished.keep_measured(known)
        stage("training")
        trained = dataclasses.replace(options, cache=None, train_plain=False) if options.train_plain else options
        trainer = _trainer(
            student, None if options.objective == "ce" else teacher, data.train, trained, folder, processing_class,
            callbacks=callbacks,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        steps = trainer.state.global_step
        # the optimizer's memory is not needed for what follows
        del trainer
        _release(student)
        stage("measuring again")
        after = measure(student, teacher, data.held_out, options, folder, processing_class)
    tokens = curve.points[-1].tokens if curve.points else 0
    before = Held(**known["before"])
    return Result(before, after, known["teacher"], steps, tokens, budget.spent, curve.points)


def measure(
    student: Any, teacher: Any, rows: Sequence[Any], options: RunOptions, folder: str, processing_class: Any = None
) -> Held:
    """A student against its teacher, in full precision, through the cache of the options."""
    plain = dataclasses.replace(options, objective="kl", alpha=0.0, temperature=1.0, bf16=False, train_plain=False)
    found = _trainer(student, teacher, rows, plain, folder, processing_class).evaluate()
    _release(student)
    return Held(found["eval_kl"], found["eval_top1"], found["eval_perplexity"])


def _release(model: Any) -> None:
    """Undo what a trainer did to a model's forward: the next one would keep it, and with it this one's precision."""
    extract_model_from_parallel(model, keep_fp32_wrapper=False)
    vars(model).pop("_is_accelerate_prepared", None)


def _trainer(
    student: Any, teacher: Any, rows: Any, options: RunOptions, folder: str, processing_class: Any, **arguments: Any
) -> DistillationTrainer:
    on_cpu = torch.device(student.device).type == "cpu"
    config = DistillationConfig(
        output_dir=folder,
        **{"alpha": options.alpha, **_SETTINGS[options.objective]},
        temperature=options.temperature,
        train_cache=options.cache,
        train_cache_config=dict(options.cache_config) if options.cache is not None else None,
        # the budget ends the run
        max_steps=10**9 if options.steps is None else options.steps,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        # 5.24 has another name for it, and warns of this one even where it is False
        **({"gradient_checkpointing": True} if options.gradient_checkpointing else {}),
        bf16=options.bf16,
        use_cpu=on_cpu,
        dataloader_pin_memory=not on_cpu,
        logging_steps=1,
        logging_first_step=True,
        # what is to be saved is asked for by the clock
        save_strategy="no",
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        seed=options.seed,
    )
    trainer = DistillationTrainer(
        student, teacher, config, train_dataset=rows, eval_dataset=rows, processing_class=processing_class, **arguments
    )
    # what is shown is ours to say
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer

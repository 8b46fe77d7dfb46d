"""Outcomes that teacher and student have in common."""

from __future__ import annotations

from typing import Any


def common_vocabulary(student_size: int, teacher_size: int, student_tokenizer: Any, teacher_tokenizer: Any) -> int:
    """How many outcomes both know: the first of either.

    Models of one tokenizer often have output layers of different size, because their rows were rounded up: the rest
    stands for no token.

    Parameters
    ----------
    student_size, teacher_size
        Rows of the output layers.
    student_tokenizer, teacher_tokenizer
        Either may be None, where it is not known.

    Raises
    ------
    ValueError
        Two tokenizers, or a vocabulary that does not fit into both models.
    """
    size = min(student_size, teacher_size)
    tokenizer = student_tokenizer or teacher_tokenizer
    if student_tokenizer is not None and teacher_tokenizer is not None:
        ours, theirs = student_tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
        if ours != theirs:
            differing = sum(theirs.get(token) != number for token, number in ours.items())
            raise ValueError(
                f"teacher and student have different tokenizers ({len(theirs):,} and {len(ours):,} tokens, "
                f"{differing:,} of the student's are another number in the teacher's): their probabilities are about "
                "different tokens. Fix: a teacher of the same family, or alpha=1 to learn from labels alone"
            )
    if tokenizer is not None and len(tokenizer) > size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer):,} tokens, and the smaller model knows {size:,}: student "
            f"{student_size:,}, teacher {teacher_size:,}"
        )
    if tokenizer is None and student_size != teacher_size:
        raise ValueError(
            f"the student has {student_size:,} outcomes and the teacher {teacher_size:,}. Fix: pass the tokenizer as "
            "processing_class=, which says whether what differs is padding"
        )
    return size

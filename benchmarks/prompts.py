"""Questions to a chat model: those that ask to repeat or edit a text, and others."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

NOTES = (
    "The library opens at nine on weekdays and at ten on Saturdays. Members may borrow six books for three weeks. "
    "Late books cost ten cents a day. The reading room on the second floor is quiet; talk in the hall. "
    "Bring your card when you come, and ask at the desk if you have lost it."
)
CODE = """def mean(values):
    total = 0
    for value in values:
        total = total + value
    return total / len(values)

def spread(values):
    middle = mean(values)
    total = 0
    for value in values:
        total = total + (value - middle) ** 2
    return total / len(values)
"""
REPEAT = [
    f"Repeat this text exactly:\n\n{NOTES}",
    f"Copy the following text word for word:\n\n{NOTES}",
    f"Correct the spelling in this text and write it again in full:\n\n{NOTES}",
    f"Write this text again, with 'books' changed to 'records':\n\n{NOTES}",
    f"Return this text unchanged:\n\n{topics['integers'][:700]}",
    f"Repeat this code exactly:\n\n{CODE}",
    f"Rename the function mean to average and show the whole code:\n\n{CODE}",
    f"Add a docstring to each function and show the whole code:\n\n{CODE}",
    "Repeat this list five times: apples, pears, plums, cherries, figs, dates, melons, grapes.",
    f"Quote this passage in full, then quote it again:\n\n{NOTES[:240]}",
]
FREE = [
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain how a bicycle stays upright.",
    "What should I consider when I buy a used car?",
    "Describe the taste of a ripe mango to someone who has never had one.",
    "Give me ideas for a birthday party in the garden.",
    "Why is the sky blue?",
    "Write a letter to a friend who has moved to another city.",
    "Compare cats and dogs as pets.",
    "How do plants drink water?",
    "Tell me about the history of bread.",
]


def chat(tokenizer: Any, question: str) -> dict[str, Any]:
    """The inputs of one question."""
    return dict(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    )

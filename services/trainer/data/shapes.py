"""Rows of known shapes as rows with `input` and `output`: data sets of the hub that say neither, and NeMo RL's multiple-choice questions.

Each function raises `ValueError` saying what a row lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Row = Mapping[str, Any]


def squad(row: Row) -> dict[str, Any]:
    """The text is the system prompt, as in NeMo RL, and the first of the answers is expected."""
    match row:
        case {"context": str(context), "question": str(question), "answers": {"text": [str(answer), *_]}}:
            messages = [{"role": "system", "content": context}, {"role": "user", "content": question}]
            return {"input": messages, "output": answer}
    raise _lacks(row, "context, question and answers.text")


def helpsteer3(row: Row) -> dict[str, Any]:
    """The context is asked; the preferred response is expected, and of two that are as good the first. (NeMo RL's processor asks with the
    response in the prompt.)"""
    match row:
        case {
            "context": context,
            "response1": str(first),
            "response2": str(second),
            "overall_preference": int(preference),
        }:
            return {"input": context, "output": second if preference > 0 else first}
    raise _lacks(row, "context, response1, response2 and overall_preference")


def multiple_choice(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The question with its options below it, worded as NeMo RL words them."""
    match row:
        case {"question": str(question), "options": {**options}, "answer": answer}:
            listed = "\n".join(f"{letter}) {option}" for letter, option in options.items() if option is not None)
            subject = {"subject": row["subject"]} if "subject" in row else {}
            return {"input": f"Question: {question}\nOptions:\n{listed}", "output": answer, **subject}
    raise _lacks(row, "question, options (a text for each letter) and answer")


# `processor` by name
PROCESSORS: Mapping[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "multichoice_qa_processor": multiple_choice
}


def _lacks(row: Row, what: str) -> ValueError:
    return ValueError(f"it needs {what}, as text, and has {', '.join(map(repr, row)) or 'nothing'}")

"""What a translation did, in lines for a person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.config.nemo.translate import Translation


def summary(translation: Translation) -> str:
    """One line."""
    others = sum(len(keys) for keys in translation.replaced.values())
    return f"read as a file of NeMo RL: {translation.used} keys used, {others} not applicable"


def lines(translation: Translation) -> Iterator[str]:
    """All of it: the summary, what has another name here, what takes the place of what, what is implied."""
    yield summary(translation)
    for theirs, ours in translation.renamed:
        yield f"renamed: {theirs} -> {ours}"
    for says, keys in translation.replaced.items():
        yield f"not applicable: {', '.join(shortened(keys))} ({says})"
    for key, value in translation.implied.items():
        yield f"implied: {key} {'null' if value is None else str(value).lower()}"


def shortened(keys: Iterable[str]) -> list[str]:
    """Keys of one section as `section.{a, b}`, in the order they come."""
    sections: dict[str, list[str]] = {}
    for key in keys:
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(name)
    return [
        f"{section}.{{{', '.join(names)}}}" if len(names) > 1 else f"{section}.{names[0]}".lstrip(".")
        for section, names in sections.items()
    ]

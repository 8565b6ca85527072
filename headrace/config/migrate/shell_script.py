"""A shell script, a command line or its words: the overrides of verl in it (`data.train_batch_size=8`). It is read, and never run."""

from __future__ import annotations

import re
import shlex
from typing import Any

from headrace.config.migrate.draft import Unread, read_scalar
from headrace.config.migrate.verl_keys import SECTIONS

_OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(SECTIONS)})(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
# Characters of a value: variables of variables could double it on every line.
_LONGEST = 100_000
_PLACES = {"HOME": "~", "PWD": "."}
_OPENS, _CLOSES = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")


def read_overrides(text: str) -> dict[str, Any]:
    """Return the overrides in a script, the last of each. Its variables are replaced by what it assigns to them outside conditions; nothing
    is executed."""
    known: dict[str, str] = {}
    given: dict[str, Any] = {}
    depth = 0
    for line in _lines(text):
        first = re.match(r"\s*(\w+)", line)
        depth += first is not None and first[1] in _OPENS
        depth -= first is not None and first[1] in _CLOSES
        if (
            assigned := re.match(r"\s*(?:export\s+|local\s+)?(\w+)=(?!\()(.*)$", line, re.DOTALL)
        ) and not _OVERRIDE.match(line.strip()):
            if depth == 0 or assigned[1] not in known:
                known[assigned[1]] = _replace(_unquoted(assigned[2]), known)
            continue
        for word in _words(line):
            if found := _OVERRIDE.fullmatch(word):
                given[found[1]] = _value(_replace(found[2], known))
    return given


def _lines(text: str) -> list[str]:
    """Return the logical lines of a shell script, without comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    # one word each
    return re.sub(r"\$\(\([^()]*(\([^()]*\)[^()]*)*\)\)", lambda found: re.sub(r"\s", "", found[0]), joined).split("\n")


def _words(line: str) -> list[str]:
    """Return the words of a line. Quotes are taken off, except those inside a list or mapping such as ['a','b']."""
    words, word, quote, is_kept = [], "", "", False
    for character in line + " ":
        if quote:
            if character != quote or is_kept:
                word += character
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote, is_kept = character, bool(re.search(r"\[|(?<!\$)\{", word))
            word += character if is_kept else ""
        elif character.isspace():
            words += [word] if word else []
            word = ""
        else:
            word += character
    return words + ([word] if word else [])


def _unquoted(text: str) -> str:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return text.strip()
    return words[0] if words else ""


def _replace(text: str, known: dict[str, str]) -> str:
    """Replace the variables that are known, and those of a place. `$((…))` of whole numbers is computed."""

    def of(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        fallback = found[2]
        if known.get(name):
            return known[name]
        return _PLACES.get(name) or (found[0] if fallback is None else fallback)

    text = re.sub(r"\$\(pwd\)|`pwd`", ".", text)
    for _ in range(5):
        text = _VARIABLE.sub(of, text)[:_LONGEST]
    return re.sub(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)", lambda found: _arithmetic(found, known), text)


def _arithmetic(found: re.Match[str], known: dict[str, str]) -> str:
    text = re.sub(r"[A-Za-z_]\w*", lambda name: known.get(name[0], name[0]), found[1])
    terms = re.fullmatch(r"\s*\(?\s*(\d+)\s*([-+*/])\s*(\d+)\s*\)?\s*(?:([-+*/])\s*(\d+)\s*)?", text)
    if terms is None:
        return text.strip() if text.strip().isdecimal() else found[0]
    whole = int(terms[1])
    for sign, number in ((terms[2], terms[3]), (terms[4], terms[5])):
        if sign == "/" and not int(number):
            return found[0]
        whole = (
            {"+": whole.__add__, "-": whole.__sub__, "*": whole.__mul__, "/": whole.__floordiv__}[sign](int(number))
            if sign
            else whole
        )
    return str(whole)


def _value(text: str) -> Any:
    if re.search(r"\$[\w({]|`", text):
        return Unread(text)
    return read_scalar(text)

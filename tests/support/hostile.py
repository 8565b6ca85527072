"""Completions that a careless judge would obey, choke on, or pay for."""

from __future__ import annotations

from pathlib import Path


def hostile(mark: Path) -> list[str]:
    """Those that run leave `mark` behind, where they can."""
    touch = f"__import__('os').system('touch {mark}')"
    return [
        touch,
        f"[{touch}]",
        f"[[{touch}]]",
        f"x + {touch}",
        f"1+{touch}*0",
        f"(lambda: {touch})()",
        f"open({str(mark)!r}, 'w')",
        f"().__class__.__base__.__subclasses__()[0]({touch!r})",
        f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', {str(mark)!r}])",
        "__import__('os').write(3, b'\\0\\0\\0\\x0b\\x08\\x01\\x11\\0\\0\\0\\0\\0\\0\\xf0?')",
        "setattr(type(self), 'score_answer', lambda *_: 1.0)",
        "entry['metadata'].__setitem__('target', 1)",
        "self.config.__dict__.update(min_value=0)",
        "9**9**9",
        "9**9**9**9",
        "1e999999999",
        "R99999999",
        "A+99999999999",
        "(" * 3000 + "1" + ")" * 3000,
        "[" * 100_000,
        "-" * 100_000 + "1",
        "1" * 100_000,
        "nan",
        "\\write18{touch " + str(mark) + "}",
        f"\\input{{{mark}}} $\\operatorname{{{touch}}}$ \\boxed{{{touch}}}",
        f"<answer>{touch}</answer>",
    ]


# What would end a judge that evaluates it, and with it the test if it ran there.
DEADLY = [
    "__import__('os')._exit(0)",
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "__import__('sys').modules.clear()",
]

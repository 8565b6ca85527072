"""The template of what a judge reads (`env.<name>.template`), and its check before a run.

The template is the author's; everything that it prints is data. Jinja runs it in a sandbox, where an undefined name is an error. Each value
that it prints stands between two lines with a mark, which is drawn anew for each request, so that no completion can have it. Only numbers,
the rubric and the template's own text stand as they are.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import ChainableUndefined, StrictUndefined, TemplateError, Undefined, meta, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.base.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config.environments import LLMJudgeConfig

# What a template knows besides `completion`, or `completions` where they are compared.
VARIABLES = ("question", "messages", "reference", "columns", "rubric", "lowest", "highest")
# Where `_delimit` finds the request's mark: under a name that no template can set.
_MARK = "the mark"
MOST_CHARACTERS = 2**20
_MOST_REPEATS = 2**16
# The limits of the process that checks a template.
_CHECK_S = 2
_CHECK_BYTES = 2**30


class Own(str):
    """Text of the configuration, which is printed without a mark."""

    __slots__ = ()


class TemplateFails(Exception):
    """Raised with the reason when a template can't be rendered."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses products whose size a number in the data decides."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        numbers = [abs(value) for value in (left, right) if isinstance(value, int | float)]
        if (operator == "**" or len(numbers) < 2) and max(numbers, default=0) > _MOST_REPEATS:
            raise TemplateError(f"{operator} with {max(numbers)} is too large")
        return super().call_binop(context, operator, left, right)


class JudgeTemplate:
    """A template, ready to render."""

    def __init__(self, source: str) -> None:
        """Compile it. Raises `TemplateFails`."""
        self._environment = _Sandbox(
            undefined=StrictUndefined, finalize=_delimit, trim_blocks=True, lstrip_blocks=True, cache_size=0
        )
        try:
            self._template = self._environment.from_string(source)
            parsed = self._environment.parse(source)
            self.names = meta.find_undeclared_variables(parsed)
        except (TemplateError, RecursionError, SyntaxError) as error:
            line = getattr(error, "lineno", None)
            raise TemplateFails(f"{error}" + (f" (line {line})" if line else "")) from error
        if (block := parsed.find(nodes.FilterBlock)) is not None:
            raise TemplateFails(
                f"{{% filter %}} would change marks, too; give each value its filter: {{{{ completion|upper }}}} (line {block.lineno})"
            )

    def render(self, values: Mapping[str, Any], mark: str) -> str:
        """Return the text for a judge. Raises `TemplateFails`."""
        parts, size = [], 0
        try:
            for part in self._template.generate({**values, _MARK: mark}):
                parts.append(part)
                size += len(part)
                if size > MOST_CHARACTERS:
                    raise TemplateFails(f"it prints more than {MOST_CHARACTERS} characters")
        except _NamesAColumn:
            raise
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise TemplateFails(f"{error}") from error
        return "".join(parts)


@pass_context
def _delimit(context: Context, value: Any) -> str:
    if isinstance(value, Own) or (isinstance(value, int | float) and not isinstance(value, Undefined)):
        return str(value)
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str | Undefined):
        value = json.dumps(value, ensure_ascii=False, default=str)
    mark = context[_MARK]
    if mark in f"{value}":  # text of the template, with values that stand between marks: from a macro or a block
        return f"{value}"
    return f"\n{mark}\n{value}\n{mark}\n"


class _NamesAColumn(Exception):
    """Raised in a check where the rest depends on a row of the data."""


class _AnyColumn(ChainableUndefined):
    """A column of a row that the check doesn't have."""

    __slots__ = ()

    def _fail_with_undefined_error(self, *_: Any, **__: Any) -> Any:
        raise _NamesAColumn

    __iter__ = __len__ = __eq__ = __ne__ = __bool__ = _fail_with_undefined_error
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __lt__ = __le__ = __gt__ = __ge__ = (
        _fail_with_undefined_error
    )
    __hash__ = ChainableUndefined.__hash__


class _AnyRow(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return _AnyColumn(name=name)


def check_template(name: str, env: LLMJudgeConfig) -> None:
    """Compile and render the template of `env.<name>`, if it has one, in a process with limits. Raises `ConfigError`."""
    if env.template is None:
        return
    shown = "completion" if env.compare is None else "completions"
    told = json.dumps({"source": env.template, "rubric": env.rubric, "scale": list(env.scale), "shown": shown})
    try:
        checked = subprocess.run(
            [sys.executable, "-P", "-m", "headrace_services.reward.judge.template"],
            input=told.encode(),
            capture_output=True,
            timeout=10 * _CHECK_S,
            check=False,
        )
        problem = checked.stdout.decode(errors="replace")
        if checked.returncode:
            lines = checked.stderr.decode(errors="replace").strip().splitlines()
            problem = (
                f"it does not end within {_CHECK_S} s" if checked.returncode < 0 else lines[-1] if lines else "it ends"
            )
    except subprocess.TimeoutExpired:
        problem = f"it does not end within {_CHECK_S} s"
    if problem:
        raise ConfigError(f"env.{name}.template: {problem}; correct the template")


def find_problem(source: str, rubric: str | None, scale: Sequence[float], shown: str) -> str:
    """Return what is wrong with a template, "" for nothing."""
    known = (shown, *VARIABLES)
    try:
        template = JudgeTemplate(source)
        if unknown := sorted(template.names - {*known, *template._environment.globals}):
            return f"{', '.join(map(repr, unknown))} is undefined; a template has {', '.join(known)}"
        if shown not in template.names:
            return f"it never shows {shown!r}, so the judge would not see what it judges"
        if rubric is not None and "rubric" not in template.names:
            return "it never shows 'rubric', which is given beside it; show it, or set rubric to null"
        message = {"role": "user", "content": "question"}
        values = {
            "question": "question",
            "messages": [message],
            "reference": "reference",
            "columns": _AnyRow(),
            "rubric": Own(rubric or ""),
            "lowest": scale[0],
            "highest": scale[1],
            shown: "completion" if shown == "completion" else ["first", "second"],
        }
        template.render(values, "mark")
    except _NamesAColumn:
        return ""
    except TemplateFails as error:
        return str(error)
    except MemoryError:
        return f"it takes more than {_CHECK_BYTES // 2**20} MiB"
    return ""


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (_CHECK_S, _CHECK_S))
    resource.setrlimit(resource.RLIMIT_AS, (_CHECK_BYTES, _CHECK_BYTES))
    told = json.load(sys.stdin)
    sys.stdout.write(find_problem(**told))


if __name__ == "__main__":
    _main()

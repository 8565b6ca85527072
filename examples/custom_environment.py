"""An environment of your own: a class with a `score` method, served in a process of its own. Needs `pip install headrace`, no torch.

The run's configuration names it, and its data set says which problems it scores. `headrace up` starts it:

    env:
      countdown:
        target: examples/custom_environment.py:Countdown
    data:
      train: {data_path: countdown.jsonl, env_name: countdown}

It can also be started by itself, here or on another machine, and be named by its address (`target: 127.0.0.1:50400`):

    python examples/custom_environment.py --port 50400

The game: reach `answer` with each of `numbers` used exactly once, and + - * / ( ). A line of countdown.jsonl:

    {"input": "Use 3, 5 and 7 once each to make 26.", "output": "26", "numbers": [3, 5, 7]}

`docs/environments.md` has the whole contract.
"""

from __future__ import annotations

import argparse
import ast
import logging
import operator
from collections.abc import Callable
from fractions import Fraction

import headrace

OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Countdown(headrace.Environment):
    name = "countdown"
    build = "1.0"
    description = "reach a number with + - * / and each given number once"

    def score(self, sample: headrace.Sample) -> headrace.Score:
        """0.1 for an expression with the right numbers, 1 if it also has the right value."""
        info = sample.extra_env_info
        if "numbers" not in info or "answer" not in info:
            # This problem can never be scored: say so. Anything raised here would be FAILED, and tried again.
            return headrace.Score("INVALID", message="extra_env_info must hold numbers and answer")
        lines = sample.completion.strip().splitlines()
        try:
            used: list[int] = []
            value = evaluate(ast.parse(lines[-1].strip(), mode="eval").body, used)
        except (IndexError, SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
            # A wrong answer is a reward of 0, not a failure: the environment did its work.
            return headrace.Score("SCORED", 0.0, {"format": 0.0, "correct": 0.0}, {"problem": str(error)})
        form = float(sorted(used) == sorted(info["numbers"]))
        correct = float(form and value == Fraction(info["answer"]))
        return headrace.Score("SCORED", 0.1 * form + 0.9 * correct, {"format": form, "correct": correct})


def evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """The value of an expression; appends the numbers in it to `used`. Nothing but numbers and operators is evaluated."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left, used), evaluate(right, used))
    raise ValueError(f"{ast.unparse(node)!r} is not made of numbers and + - * /")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=50400, help="0 takes a free one; the log says which")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    headrace.serve(Countdown(), port=arguments.port)

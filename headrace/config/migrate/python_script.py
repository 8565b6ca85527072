"""A Python script that trains with TRL: what its calls of `GRPOConfig`, `GRPOTrainer` and `LoraConfig` say. It is read, and never run."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from headrace.base.errors import ConfigError
from headrace.config.migrate.draft import Unread


class Reward(NamedTuple):
    name: str  # of the function
    target: str | None  # FILE.py:NAME; None for a model
    model: str | None = None


class Script(NamedTuple):
    """What a script or a command says. `given` are the arguments of the script's calls; `set_later` are the attributes of the configuration
    that it sets afterwards, which count over a command's flags too."""

    given: dict[str, Any]
    rewards: list[Reward]
    data: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    to_add: list[str]
    files: dict[str, str]
    set_later: dict[str, Any]


def read_script(path: Path, folder: Path, has_flags: bool) -> Script:
    """Read the calls of a script, which is not run. `has_flags`: its command gives the settings that it reads from there."""
    try:
        text = path.read_text(encoding="utf-8")
        module = ast.parse(text, str(path))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as Python: {error}") from error
    names = _assigned(module)
    calls = {
        name: call for call in ast.walk(module) if isinstance(call, ast.Call) and (name := _called(call)) in _CALLS
    }
    if "GRPOTrainer" not in calls and "GRPOConfig" not in calls:
        raise ConfigError(
            f"{path} calls neither GRPOTrainer nor GRPOConfig; give the script that trains, or the command that runs it"
        )
    given: dict[str, Any] = {}
    to_add = []
    if not has_flags and any(
        "ArgumentParser" in (name := _called(call)) or name == "TrlParser"
        for call in ast.walk(module)
        if isinstance(call, ast.Call)
    ):
        to_add.append(
            f'{path} reads settings from its command line; give the whole command: headrace migrate trl "python {path} --…"'
        )
    for name in ("GRPOConfig", "GRPOTrainer", "LoraConfig"):
        for keyword in calls[name].keywords if name in calls else ():
            if keyword.arg is None:
                to_add.append(f"{name}(**{ast.unparse(keyword.value)}): only running the script would tell these keys")
            elif not (
                name == "GRPOTrainer"
                and keyword.arg in ("args", "reward_funcs", "train_dataset", "eval_dataset", "peft_config")
            ):
                given[keyword.arg] = _literal(keyword.value, names)
        if name in calls and calls[name].args and name != "GRPOTrainer":
            to_add.append(f"{ast.unparse(calls[name].args[0])} of {name} has no name; name it")
    if "LoraConfig" in calls:
        given.setdefault("r", 8)
    trainer = {each.arg: each.value for each in calls["GRPOTrainer"].keywords} if "GRPOTrainer" in calls else {}
    if "GRPOTrainer" in calls:
        for argument, place in zip(
            calls["GRPOTrainer"].args, ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"), strict=False
        ):
            trainer.setdefault(place, argument)
            if place == "model":
                given["model"] = _literal(argument, names)
    rewards, wanted = _rewards(trainer.get("reward_funcs"), module, path, folder, names, to_add)
    files = {}
    if wanted:
        files[_copy_name(path)] = _copy_functions(module, text, path.name, wanted, to_add)
    data = _data(trainer.get("train_dataset"), module, names, to_add)
    evaluation = _data(trainer.get("eval_dataset"), module, names, to_add) if "eval_dataset" in trainer else None
    return Script(given, rewards, data, evaluation, to_add, files, _set_later(module, trainer.get("args"), names))


_CALLS = ("GRPOConfig", "GRPOTrainer", "LoraConfig")


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _assigned(module: ast.Module) -> dict[str, ast.expr]:
    """Return what each name that is assigned once is; one that is assigned again is not among them."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(module):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign | ast.AugAssign)
            else []
        )
        for target in targets:
            if isinstance(target, ast.Name) and node.value is not None:  # type: ignore[attr-defined]
                found.setdefault(target.id, []).append(node.value)  # type: ignore[attr-defined]
    return {name: values[0] for name, values in found.items() if len(values) == 1}


def _set_later(module: ast.Module, config: ast.expr | None, names: dict[str, ast.expr]) -> dict[str, Any]:
    """Return what the script sets as attributes of the `config` that it gives the trainer; `Unread` for one that only some runs set, or
    that is set again."""
    if not isinstance(config, ast.Name):
        return {}
    branches = [
        each
        for each in ast.walk(module)
        if isinstance(each, ast.If | ast.For | ast.While | ast.Try)
        and "__name__" not in ast.unparse(each).partition(":")[0]
    ]
    sometimes = {id(inner) for each in branches for inner in ast.walk(each)}
    found: dict[str, Any] = {}
    for node in ast.walk(module):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            match target:
                case ast.Attribute(value=ast.Name(id=name), attr=key) if name == config.id:
                    read = isinstance(node, ast.Assign) and id(node) not in sometimes and key not in found
                    value = node.value  # type: ignore[attr-defined]
                    found[key] = _literal(value, names) if read else Unread(ast.unparse(value))
    return found


def _literal(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> Any:
    """Return the value of a literal, of a name that was given one, and of `torch.bfloat16`; `Unread` for any other expression."""
    if isinstance(node, ast.Name) and node.id in names and depth < 5:
        return _literal(names[node.id], names, depth + 1)
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return node.attr
    if (
        isinstance(node, ast.Call)
        and _called(node) == "dict"
        and not node.args
        and all(each.arg for each in node.keywords)
    ):
        return {str(each.arg): _literal(each.value, names, depth + 1) for each in node.keywords}
    if isinstance(node, ast.List | ast.Tuple):
        items = [_literal(each, names, depth + 1) for each in node.elts]
        return Unread(ast.unparse(node)) if any(isinstance(each, Unread) for each in items) else items
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Unread(ast.unparse(node))


def _copy_name(path: Path) -> str:
    return f"{path.stem}_rewards.py"


def _rewards(
    node: ast.expr | None, module: ast.Module, path: Path, folder: Path, names: dict[str, ast.expr], to_add: list[str]
) -> tuple[list[Reward], list[str]]:
    """Return the reward functions of the argument, and the names of those that the script itself defines."""
    if isinstance(node, ast.Name) and node.id in names:
        node = names[node.id]
    defined = {each.name for each in ast.walk(module) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    imported = {
        alias.asname or alias.name: (each.module or "", alias.name)
        for each in ast.walk(module)
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    found, wanted = [], []
    for each in node.elts if isinstance(node, ast.List | ast.Tuple) else [] if node is None else [node]:
        match each:
            case ast.Constant(value=str(model)):
                found.append(Reward(environment_name(model.rpartition("/")[2]), None, model))
            case ast.Name(id=name) if name in defined:
                found.append(Reward(name, f"{folder / _copy_name(path)}:{name}"))
                wanted.append(name)
            case ast.Name(id=name) if (
                name in imported and (beside := path.parent / f"{imported[name][0]}.py").is_file()
            ):
                found.append(Reward(name, f"{beside}:{imported[name][1]}"))
            case ast.Name(id=name) if name in imported:
                found.append(Reward(name, f"rewards.py:{name}"))
                from_, original = imported[name]
                to_add.append(f"rewards.py, with `from {from_} import {original}`; its package must be installed here")
            case _:
                name = environment_name(ast.unparse(each).partition("(")[0].rpartition(".")[2])
                found.append(Reward(name, f"rewards.py:{name}"))
                to_add.append(f"rewards.py, with `{name} = {ast.unparse(each)}`")
    return found, wanted


def _copy_functions(module: ast.Module, text: str, source: str, wanted: list[str], to_add: list[str]) -> str:
    """Return a file with these functions of a script, and with the imports and definitions that they use."""
    statements = [*module.body]
    for statement in module.body:
        if isinstance(statement, ast.If):
            statements += statement.body
    there: dict[str, ast.stmt] = {
        each.name: each for each in ast.walk(module) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for statement in statements:
        there |= dict.fromkeys(_bound(statement), statement)
    taken: dict[str, ast.stmt] = {}
    queue = list(wanted)
    while queue:
        name = queue.pop()
        if name in taken or name not in there:
            continue
        taken[name] = there[name]
        queue += [each.id for each in ast.walk(there[name]) if isinstance(each, ast.Name)]
    imports, copied = [], []
    lines = text.splitlines()
    for name, statement in sorted(taken.items(), key=lambda item: item[1].lineno):
        if isinstance(statement, ast.Import | ast.ImportFrom):
            alias = next(each for each in statement.names if (each.asname or each.name.partition(".")[0]) == name)
            one = (
                ast.ImportFrom(statement.module, [alias], statement.level)
                if isinstance(statement, ast.ImportFrom)
                else ast.Import([alias])
            )
            origin = (statement.module or "") if isinstance(statement, ast.ImportFrom) else alias.name
            if origin.partition(".")[0] == "trl":
                to_add.append(f"what replaces {name} of TRL, which the copied functions use")
            imports.append(ast.unparse(one))
        else:
            first = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", []))])
            block = textwrap.dedent("\n".join(lines[first - 1 : statement.end_lineno]))
            if block not in copied:
                copied.append(block)
    future = [each for each in module.body if isinstance(each, ast.ImportFrom) and each.module == "__future__"]
    head = [
        f'"""The reward functions of {source}, copied by `headrace migrate`."""',
        "",
        *map(ast.unparse, future),
        *dict.fromkeys(imports),
    ]
    return "\n".join(head).rstrip() + "\n\n\n" + "\n\n\n".join(copied) + "\n"


def _bound(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module binds."""
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname or alias.name.partition(".")[0] for alias in names]
        case ast.Assign(targets=targets):
            return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def environment_name(text: str) -> str:
    return re.sub(r"\W", "_", text)[:64] or "reward"


def _data(
    node: ast.expr | None, module: ast.Module, names: dict[str, ast.expr], to_add: list[str]
) -> dict[str, Any] | None:
    """Return the data set that an argument names: the call of `load_dataset` whose result it is."""
    part = None
    if isinstance(node, ast.Subscript):
        part, node = _literal(node.slice, names), node.value
    call, changed, order = node, False, 0
    name = node.id if isinstance(node, ast.Name) else ""
    if name:
        for each in ast.walk(module):
            if isinstance(each, ast.Assign) and len(each.targets) == 1:
                target = each.targets[0]
                inside = [e.id for e in target.elts if isinstance(e, ast.Name)] if isinstance(target, ast.Tuple) else []
                if name in inside:
                    call, order = each.value, inside.index(name)
                elif isinstance(target, ast.Name) and target.id == name:
                    call, changed = (
                        (call, True) if isinstance(call, ast.Call) and _loads(call) else (each.value, changed)
                    )
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and _called(call) != "load_dataset":
        call, changed = call.func.value, True
    if isinstance(call, ast.Subscript):
        part, call = _literal(call.slice, names), call.value
    if not (isinstance(call, ast.Call) and _loads(call)):
        return None
    arguments = dict(zip(("path", "name"), (_literal(each, names) for each in call.args), strict=False))
    arguments |= {str(each.arg): _literal(each.value, names) for each in call.keywords}
    split = part if isinstance(part, str) else arguments.get("split", "train")
    split = split[order] if isinstance(split, list) and order < len(split) else split
    path = arguments.get("data_files") if arguments.get("path") in ("json", "parquet", "csv") else arguments.get("path")
    if not isinstance(path, str) or not isinstance(split, str):
        return None
    if changed:
        to_add.append(
            f"data.train[0].processor: the script changes the rows of {path}; give a function that turns a row of it into one with "
            "`prompt` and the columns of the rewards (docs/data.md, Code of your own)"
        )
    is_file = Path(path).suffix in (".json", ".jsonl", ".parquet")
    subset = arguments.get("name")
    return {
        "data_path": path,
        **({"subset": subset} if isinstance(subset, str) else {}),
        **({} if is_file else {"split": split}),
    }


def _loads(call: ast.Call) -> bool:
    return _called(call) == "load_dataset"

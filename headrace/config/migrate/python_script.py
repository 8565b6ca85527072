"""A Python script that trains with TRL: what its calls of `GRPOConfig`, `GRPOTrainer` and `LoraConfig` say. It is read, and never run."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.base.errors import ConfigError
from headrace.config.migrate.copied_code import Copy, copy_code
from headrace.config.migrate.draft import Unread


class Reward(NamedTuple):
    name: str  # of the function
    options: Mapping[str, Any]  # of its environment


# TRL's own reward functions, and the built-in environments that do the same.
TRLS: Mapping[str, Mapping[str, Any]] = {
    "accuracy_reward": {"type": "math"},  # compares with the column `solution`
    "think_format_reward": {"type": "regex", "pattern": r"(?s)\A<think>(?!.*<think>).*?</think>"},
}


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
    copier = _Copier(module, text, path, folder, calls.get("GRPOTrainer"), to_add)
    rewards = _rewards(trainer.get("reward_funcs"), module, path, names, copier)
    data = _data(trainer.get("train_dataset"), "training_problems", module, names, copier, to_add)
    evaluation = _data(trainer.get("eval_dataset"), "validation_problems", module, names, copier, to_add)
    later = _set_later(module, trainer.get("args"), names)
    return Script(given, rewards, data, evaluation, to_add, copier.files(), later)


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


class _Copier:
    """Copies what a run needs of a script into files beside the configuration."""

    def __init__(
        self, module: ast.Module, text: str, path: Path, folder: Path, trainer: ast.Call | None, to_add: list[str]
    ) -> None:
        self._module, self._text, self._path, self._folder, self._trainer = module, text, path, folder, trainer
        self._to_add = to_add
        self._rewards: list[str] = []  # statements that end their file
        self._data: list[str] = []

    def target(self, name: str, expression: ast.expr | None = None) -> str:
        """Return the target of a reward function of this name; `expression` makes it, if the script does not bind the name."""
        self._rewards.append(name if expression is None else f"{name} = {ast.unparse(expression)}")
        return f"{self._folder / self._file('rewards')}:{name}"

    def data_set(self, name: str, expression: ast.expr) -> str | None:
        """Return the `dataset_name` of the rows that an expression makes; None if only running the whole script would tell them."""
        made = f"def {name}():\n    return {ast.unparse(expression)}"
        copy = self._copy([made], "data sets")
        if copy.missing or _reads_command(copy) or any(package == "trl" for package, _ in copy.imported):
            return None
        if re.search(r"\brandom\.(?!seed|Random|default_rng)\w+\(", copy.text) and ".seed(" not in copy.text:
            self._to_add.append(
                f"{self._file('data')}: a seed of the random numbers, because its rows must be the same each time"
            )
        self._data.append(made)
        return f"{self._folder / self._file('data')}:{name}"

    def files(self) -> dict[str, str]:
        """Return the files by name, and say what they lack."""
        found = {}
        for what, made in (("rewards", self._rewards), ("data", self._data)):
            if made:
                copy = self._copy(made, "reward functions" if what == "rewards" else "data sets")
                found[self._file(what)] = copy.text
                self._to_add += (f"{self._file(what)}: {lacking}" for lacking in _lacking(copy))
        return found

    def _copy(self, made: list[str], what: str) -> Copy:
        title = f"The {what} of {self._path.name}, copied by `headrace migrate`."
        return copy_code(self._module, self._text, self._trainer, title, made)

    def _file(self, what: str) -> str:
        return f"{self._path.stem}_{what}.py"


def _lacking(copy: Copy) -> Iterator[str]:
    """Yield what a file needs before it can be used."""
    for name in copy.missing:
        yield f"{name}, which it uses, and which only running the script would tell"
    for package in dict.fromkeys(package for package, _ in copy.imported):
        if package and importlib.util.find_spec(package) is None:
            how = ": pip install --no-deps trl" if package == "trl" else ""
            yield f"the package {package} must be installed here{how}"
    if _reads_command(copy):
        yield "values in place of those that it reads from a command line, which a reward has not"
    if "math_verify" in (package for package, _ in copy.imported) and "_timeout" not in copy.text:
        yield "parsing_timeout=None for math_verify's parse, and timeout_seconds=None for verify: a reward runs in a thread"


def _reads_command(copy: Copy) -> bool:
    return re.search(r"parse_args|ArgumentParser|sys\.argv", copy.text) is not None


def _rewards(
    node: ast.expr | None, module: ast.Module, path: Path, names: dict[str, ast.expr], copier: _Copier
) -> list[Reward]:
    """Return the reward functions of the argument."""
    if isinstance(node, ast.Name) and node.id in names:
        node = names[node.id]
    imported = {
        alias.asname or alias.name: (each.module or "", alias.name)
        for each in ast.walk(module)
        if isinstance(each, ast.ImportFrom)
        for alias in each.names
    }
    modules = {
        alias.asname or alias.name: alias.name
        for each in ast.walk(module)
        if isinstance(each, ast.Import)
        for alias in each.names
    }
    found: list[Reward] = []

    def beside(module_name: str) -> Path | None:
        file = path.parent.joinpath(*module_name.split(".")).with_suffix(".py")
        return file if file.is_file() else None

    for each in node.elts if isinstance(node, ast.List | ast.Tuple) else [] if node is None else [node]:
        if isinstance(each, ast.Name) and isinstance(names.get(each.id), ast.Constant):
            each = names[each.id]
        match each:
            case ast.Constant(value=str(model)):
                found.append(reward_of_model(model))
            case ast.Name(id=name) if name in imported and (file := beside(imported[name][0])):
                found.append(Reward(name, {"target": f"{file}:{imported[name][1]}"}))
            case ast.Attribute(value=ast.Name(id=origin), attr=name) if origin in modules and (
                file := beside(modules[origin])
            ):
                found.append(Reward(name, {"target": f"{file}:{name}"}))
            case ast.Name(id=name) if (
                name in imported and imported[name][0].startswith("trl") and imported[name][1] in TRLS
            ):
                found.append(Reward(name, TRLS[imported[name][1]]))
            case ast.Name(id=name):
                found.append(Reward(name, {"target": copier.target(name)}))
            case _:
                name = _name_of(each)
                if not name or name in (reward.name for reward in found):
                    name = f"{name or 'reward'}_{len(found) + 1}"
                found.append(Reward(name, {"target": copier.target(f"{name}_reward", each)}))
    return found


def _name_of(node: ast.expr) -> str:
    """Return the name of the function that an expression makes, or of which it makes another; empty for a lambda."""
    if isinstance(node, ast.Call) and _called(node) == "partial" and node.args:
        node = node.args[0]
    name = ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]
    return name if name.isidentifier() else ""


def reward_of_model(model: str) -> Reward:
    return Reward(environment_name(model.rpartition("/")[2]), {"type": "reward_model", "model_name": model})


def environment_name(text: str) -> str:
    return re.sub(r"\W", "_", text)[:64] or "reward"


def _data(
    node: ast.expr | None, own: str, module: ast.Module, names: dict[str, ast.expr], copier: _Copier, to_add: list[str]
) -> dict[str, Any] | None:
    """Return the data set that an argument names: that of the call of `load_dataset` whose result it is, or else a function `own` that is
    copied from the script."""
    loaded, is_changed = _loaded(node, module, names)
    if node is None or (loaded is not None and not is_changed):
        return loaded
    if (code := copier.data_set(own, node)) is not None:
        return {"dataset_name": code}
    if loaded is not None:
        to_add.append(
            f"data.train[0].processor: the script changes the rows of {loaded['data_path']}; give a function that turns a row of "
            "it into one with `prompt` and the columns of the rewards (docs/data.md, Code of your own)"
        )
    return loaded


def _loaded(
    node: ast.expr | None, module: ast.Module, names: dict[str, ast.expr]
) -> tuple[dict[str, Any] | None, bool]:
    """Return the data set of the call of `load_dataset` whose result an argument is, and whether the script changes its rows."""
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
        return None, True
    arguments = dict(zip(("path", "name"), (_literal(each, names) for each in call.args), strict=False))
    arguments |= {str(each.arg): _literal(each.value, names) for each in call.keywords}
    split = part if isinstance(part, str) else arguments.get("split", "train")
    split = split[order] if isinstance(split, list) and order < len(split) else split
    path = arguments.get("data_files") if arguments.get("path") in ("json", "parquet", "csv") else arguments.get("path")
    if not isinstance(path, str) or not isinstance(split, str):
        return None, True
    is_file = Path(path).suffix in (".json", ".jsonl", ".parquet")
    subset = arguments.get("name")
    found = {
        "data_path": path,
        **({"subset": subset} if isinstance(subset, str) else {}),
        **({} if is_file else {"split": split}),
    }
    return found, changed


def _loads(call: ast.Call) -> bool:
    return _called(call) == "load_dataset"

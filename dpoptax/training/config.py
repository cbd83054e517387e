"""Reads configs: functions with keyword arguments that return a `Task`."""

import contextlib
import dataclasses
import fnmatch
import hashlib
import importlib
import inspect
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import docstring_parser

from dpoptax.training import named_configs
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.training.task import Task


class Flag(NamedTuple):
    """An argument of a config.

    Attributes:
        kind: Its type annotation.
        default: Its default.
        text: Its description in the docstring.
    """

    kind: Any
    default: Any
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Config:
    """A function that returns a `Task`, with values of its arguments.

    An argument whose default is a dataclass stands for its fields, so that configs can share flags.

    Attributes:
        name: Name of the config.
        function: The function.
        values: Values of arguments that differ from their defaults.
        source: Path of its file, or "".
        digest: SHA-256 of its file and of the neighbors that the file imports.
    """

    name: str
    function: Callable[..., Task]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    source: str = ""
    digest: str = ""

    @property
    def flags(self) -> dict[str, Flag]:
        """The arguments by name, with the values of the config as defaults."""
        found = flags_of(self.function)
        return {
            name: flag._replace(default=self.values.get(name, flag.default))
            for name, flag in found.items()
        }

    def replace(self, **values: Any) -> "Config":
        """Returns the config with other values.

        Raises:
            ConfigError: The function has no such argument.
        """
        known = self.flags
        for name in values:
            if name not in known:
                raise unknown_name(f"{self.name}: An argument", name, known)
        return dataclasses.replace(self, values={**self.values, **values})

    def task(self, **values: Any) -> Task:
        """Calls the function.

        Raises:
            ConfigError: An argument is unknown, or the function raises an error or returns no task.
        """
        given = {name: flag.default for name, flag in self.replace(**values).flags.items()}
        grouped: dict[str, Any] = {}
        with _explains(f"Config {self.name} of {self.source}", self.source):
            for name, parameter in inspect.signature(self.function).parameters.items():
                if dataclasses.is_dataclass(parameter.default):
                    shared: Any = parameter.default
                    own = {each.name: given[each.name] for each in dataclasses.fields(shared)}
                    grouped[name] = dataclasses.replace(shared, **own)
                else:
                    grouped[name] = given[name]
            task = self.function(**grouped)
        if not isinstance(task, Task):
            raise ConfigError(f"The config {self.name} must return a Task, got {task!r}.")
        return task

    def described(self) -> dict[str, Any]:
        """Returns the values of all arguments except the seed as JSON values, for summaries."""
        return {name: _plain(f.default) for name, f in self.flags.items() if name != "seed"}


@contextlib.contextmanager
def _explains(what: str, path: str) -> Iterator[None]:
    """Turns an error of the user's code into a `ConfigError` that names the last line of a file."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the user's code can raise any error
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        where = f"{what}, line {lines[-1]}" if lines else what
        raise ConfigError(f"{where}: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = getattr(value, "name", type(value).__name__)
        return {"name": name, **{k: _plain(x) for k, x in dataclasses.asdict(value).items()}}
    known = value is None or isinstance(value, str | bool | int | float)
    return value if known else str(value)


def flags_of(function: Callable[..., Any]) -> dict[str, Flag]:
    """Returns the arguments of a function by name, with the fields of dataclass arguments.

    Raises:
        ConfigError: An argument has no default or no type.
    """
    kinds, found = typing.get_type_hints(function, include_extras=True), dict[str, Flag]()
    texts = _texts(function.__doc__)
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        if default is parameter.empty or name not in kinds:
            raise ConfigError(
                f"`{name}` of the config {function.__name__} must have a type and a default, which "
                "the command line shows. Write, for example, `epsilon: float = 3.0`."
            )
        if dataclasses.is_dataclass(default):
            own = typing.get_type_hints(type(default), include_extras=True)
            said = _texts(type(default).__doc__)
            for each in dataclasses.fields(default):
                value = getattr(default, each.name)
                found[each.name] = Flag(own[each.name], value, said.get(each.name, ""))
        else:
            found[name] = Flag(kinds[name], default, texts.get(name, ""))
    return found


def _texts(docstring: str | None) -> dict[str, str]:
    """Returns the descriptions of arguments in a docstring."""
    parsed = docstring_parser.parse(docstring or "")
    return {each.arg_name: " ".join((each.description or "").split()) for each in parsed.params}


def load_configs(path: str | Path) -> dict[str, Config]:
    """Reads the configs of a Python file, or of an installed name, by name.

    A config is a function of the file that is annotated to return a `Task`. A file with many
    similar ones defines `get_configs()` instead, which returns functions or dataclasses with a
    method `task()` by name. `FILE:PATTERN` selects some of them, such as `table1.py:mnist/*`. If
    there is no such file, a name that `dpoptax configs` lists means an installed config or set.

    Raises:
        ConfigError: The file does not exist, raises an error, or defines no config that matches.
    """
    path, pattern = str(path), "*"
    if ":" in path and not Path(path).is_file():
        path, pattern = path.rsplit(":", 1)
    if not Path(path).is_file():
        if files := named_configs.find(path):
            return {name: c for file in files for name, c in load_configs(file).items()}
        raise ConfigError(
            f"`config` must be a Python file or an installed name, got {path!r}. Pass the path of "
            "an existing file, or a name that `dpoptax configs` lists."
        )
    with _explains(f"Config file {path}", path):
        module, digest = _run(path)
        found = _defined(module)
    if not found:
        raise ConfigError(
            f"The config file {path} must define a function that returns a Task, got none. "
            "Annotate it: `def my_run(epsilon: float = 3.0) -> Task:`."
        )
    chosen = {name: found[name] for name in found if fnmatch.fnmatchcase(name, pattern)}
    if not chosen:
        raise unknown_name("config", pattern, found)
    return {name: Config(name, _function(each), {}, path, digest) for name, each in chosen.items()}


def load_config(path: str | Path) -> Config:
    """Reads a single config; see `load_configs`. A set's name means its baseline.

    Raises:
        ConfigError: As for `load_configs`, or `path` names several configs.
    """
    if str(path) in named_configs.SETS and not Path(path).is_file():
        path = named_configs.find(str(path))[0]
    configs = load_configs(path)
    if len(configs) > 1:
        raise ConfigError(
            f"`config` must name one run, got {len(configs)} runs in {path}. Pass one as "
            f"FILE:NAME, for example {path}:{next(iter(configs))}. `dpoptax plan {path}` lists all "
            "of them."
        )
    return next(iter(configs.values()))


def config_of(function: Any, **values: Any) -> Config:
    """Returns the config of a function or a dataclass that Python code defines."""
    name = getattr(function, "__name__", type(function).__name__)
    return Config(name, _function(function)).replace(**values)


def _function(config: Any) -> Callable[..., Task]:
    """Returns a function as it is, and that of a dataclass with a method `task()`."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        return typing.cast(Callable[..., Task], config)

    def function(settings: Any = config) -> Task:
        return typing.cast(Any, settings).task()

    return function


def _run(path: str) -> tuple[types.ModuleType, str]:
    """Runs a file as a module that can import its neighbors, and returns its digest.

    Neighbors are forgotten afterwards, since files of another folder may have their names.
    """
    folder, before = str(Path(path).resolve().parent), set(sys.modules)
    module = types.ModuleType(f"<config {path}>")
    module.__file__ = path
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    # Register the module first, because dataclasses look up the module that defines them.
    sys.modules[module.__name__] = module
    try:
        source = Path(path).read_bytes()
        exec(compile(source, path, "exec"), vars(module))
        digest = hashlib.sha256(source)
        for name in sorted(set(sys.modules) - before - {module.__name__}):
            file = getattr(sys.modules[name], "__file__", None)
            places = [file] if file else list(getattr(sys.modules[name], "__path__", ()))
            if any(Path(place).is_relative_to(folder) for place in places):
                digest.update(Path(file).read_bytes() if file else b"")
                del sys.modules[name]
        return module, digest.hexdigest()
    finally:
        sys.path.remove(folder)


def _defined(module: types.ModuleType) -> dict[str, Any]:
    """Returns the configs that a file defines, by name."""
    if (several := getattr(module, "get_configs", None)) is not None:
        return dict(several())
    return {
        name: each
        for name, each in vars(module).items()
        if inspect.isfunction(each)
        and each.__module__ == module.__name__
        and typing.get_type_hints(each).get("return") is Task
        and not name.startswith("_")
    }

"""The command line: `dpoptax train`, `configs`, `plan`, `compare`, `sweep` and `audit`."""

import logging
import sys
import warnings
from collections.abc import Callable, Sequence

import dpoptax
from dpoptax.training.cli import compilation_cache
from dpoptax.training.errors import unknown_name

# Commands with options that depend on the config. Their help without a config lists none.
_CONFIG_FIRST = ("train", "audit")
# Packages that commands need and `import dpoptax` does not.
_EXTRA = ("flax", "matplotlib", "orbax", "sklearn", "tqdm", "tyro")

# The arguments and the results of commands.
_COMMANDS = {
    "train": ("CONFIG --workdir DIR", "trains one run"),
    "configs": ("", "lists the names of installed configs"),
    "plan": ("[CONFIG]", "computes noise, ε and cost of a run"),
    "compare": ("CONFIG... --workdir DIR", "compares configs at one ε"),
    "sweep": ("CONFIG... --workdir DIR", "tries settings; its ε covers the choice"),
    "audit": ("CONFIG...", "attacks the claimed ε"),
}

_LISTED = "\n".join(f"  {f'{name} {a}':33} {what}" for name, (a, what) in _COMMANDS.items())
_USAGE = f"""\
usage: dpoptax COMMAND ...

Differentially private training in JAX. A CONFIG is a Python file with a
function that returns a Task, FILE:NAME for one of several, or an installed
name such as `digits`. The arguments of the function are options.

commands:
{_LISTED}

`dpoptax train CONFIG --help` lists all options, and so on.
`dpoptax --version` prints the version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code, 2 for errors of the user."""
    return run_command("dpoptax", _dispatch, arguments)


def run_command(
    program: str, dispatch: Callable[[list[str]], int], arguments: Sequence[str] | None = None
) -> int:
    """Runs a command and returns the exit code.

    Each warning is printed once. Errors that a user can fix are printed without traceback.

    Args:
        program: Name of the program, at the start of each message.
        dispatch: Runs the command that the arguments name and returns the exit code.
        arguments: Arguments of the command line. None: those of this process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Silences orbax, whose log repeats the errors about unreadable checkpoints.
    logging.getLogger("absl").setLevel(logging.ERROR)
    shown: set[str] = set()

    def show_once(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in shown:
            shown.add(str(message))
            print(f"{program}: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.filterwarnings("default", category=UserWarning)
        warnings.showwarning = show_once
        try:
            return dispatch(arguments)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in _EXTRA:
                raise
            raise SystemExit(
                f"{program}: error: The command line needs {error.name}, which is not installed. "
                "Run: pip install 'dpoptax[train]'"
            ) from error
        except (ValueError, OSError) as error:
            print(f"{program}: error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"{program}: interrupted", file=sys.stderr)
            return 130


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"dpoptax {dpoptax.__version__}")
        return 0
    command, *rest = arguments
    if command in _CONFIG_FIRST and (not rest or rest[0] in ("-h", "--help")):
        print(f"usage: dpoptax {command} {_COMMANDS[command][0]} ...\n")
        print(
            f"The arguments of the config are options. List them: dpoptax {command} CONFIG --help"
        )
        if not rest:
            print(
                f"dpoptax: error: `dpoptax {command}` needs a config: a Python file with "
                "a function that returns a Task, or a name that `dpoptax configs` lists.",
                file=sys.stderr,
            )
        return 0 if rest else 2
    from dpoptax.training.cli.commands import (
        COMMANDS,  # imported late, because help does not need them
    )

    if command not in COMMANDS:
        raise unknown_name("command", command, COMMANDS)
    compilation_cache.keep_programs()
    return COMMANDS[command](rest)

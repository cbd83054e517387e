"""The command line: `dpoptax train`, `configs`, `plan`, `compare`, `sweep` and `audit`."""

import logging
import sys
import warnings
from collections.abc import Callable, Sequence

import dpoptax
from dpoptax.training.cli import compilation_cache
from dpoptax.training.errors import unknown_name

# Commands with options that depend on the config. Their help without a config lists none.
_CONFIG_FIRST = ("train", "plan", "audit")
# Packages that commands need and `import dpoptax` does not.
_EXTRA = ("flax", "matplotlib", "orbax", "sklearn", "tqdm", "tyro")

_COMMANDS = {
    "train": """\
  train CONFIG --workdir DIR [--NAME VALUE ...]
        trains one run; CONFIG is a Python file with a function that returns a
        Task, FILE:NAME for one of several, or an installed name such as
        `digits`; the arguments of the function are options""",
    "configs": """\
  configs
        lists the names of installed configs""",
    "plan": """\
  plan CONFIG [--NAME VALUE ...]
        computes noise, ε, power of attacks, memory and FLOPs of the run without
        training; several runs give a table
  plan --dataset-size N --batch-size B --epochs E --epsilon ε --delta δ
        computes the noise of a run from its numbers alone
  plan [CONFIG] --suggest [--examples E | --flops F]
        suggests batch size, steps and noise for a compute budget""",
    "compare": """\
  compare CONFIG... --workdir DIR [--seeds N] [--epsilon E]
          [--factors F...] [--set NAME=VALUE...]
        trains several configs at one ε and writes a table and a figure""",
    "sweep": """\
  sweep CONFIG... --workdir DIR
          --grid NAME=V,V... | --random NAME=log:LOW:HIGH... --trials N
        trains many settings and keeps the best; its ε covers the choice""",
    "audit": """\
  audit CONFIG... [--trials N] [--confidence C] [--NAME VALUE ...]
        attacks the training of each CONFIG and lists the claimed ε and lower
        bounds on it; exit code 1 if a bound exceeds the claim""",
}

_LISTED = "\n".join(_COMMANDS.values())
_USAGE = f"""\
usage: dpoptax COMMAND ...

Differentially private training in JAX.

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
        print(f"usage: dpoptax {_COMMANDS[command].strip()}\n")
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

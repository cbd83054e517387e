"""The command line: `dpoptax train`, `plan`, `compare`, `sweep` and `audit`."""

import logging
import sys
import warnings
from collections.abc import Callable, Sequence

import dpoptax
from dpoptax.cli import compilation_cache
from dpoptax.training.cache_folder import cache_folder
from dpoptax.training.errors import unknown_name

# Commands whose options depend on the config, so that help without a config lists none.
_CONFIG_FIRST = ("train", "plan", "audit")
# What commands cannot do without and `import dpoptax` can.
_EXTRA = ("flax", "matplotlib", "orbax", "sklearn", "tqdm", "tyro")

_COMMANDS = {
    "train": """\
  train CONFIG --workdir DIR [--FIELD VALUE ...]
        one run; CONFIG is a Python file with get_config(), or FILE:NAME for
        one of the runs of its get_configs(); any field can be overridden""",
    "plan": """\
  plan CONFIG [--FIELD VALUE ...]
        noise, ε, what attacks can do, memory and FLOPs of that run, without
        training; a table where CONFIGs name several runs
  plan [CONFIG] --suggest [--examples E | --flops F]
        batch size, steps and noise for a compute budget""",
    "compare": """\
  compare CONFIG... --workdir DIR [--seeds N] [--epsilon E]
          [--learning-rates R...] [--set FIELD=VALUE...]
        several configs at one ε: a table and a figure""",
    "sweep": """\
  sweep CONFIG... --workdir DIR
          --grid FIELD=V,V... | --random FIELD=log:LOW:HIGH... --trials N
        the best of many settings, at an ε that covers the choice""",
    "audit": """\
  audit CONFIG... [--trials N] [--confidence C] [--FIELD VALUE ...]
        attacks on the training that each CONFIG says: a table of claimed ε
        and audited lower bound; exit code 1 if a bound exceeds its claim""",
}

_LISTED = "\n".join(_COMMANDS.values())
_USAGE = f"""\
usage: dpoptax COMMAND ...

Differentially private training in JAX.

commands:
{_LISTED}

`dpoptax train CONFIG --help`, and so on, lists all options;
`dpoptax --version` prints the version."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 2 for anything that the user can mend."""
    return run_command("dpoptax", _dispatch, arguments)


def run_command(
    program: str, dispatch: Callable[[list[str]], int], arguments: Sequence[str] | None = None
) -> int:
    """Runs the command that the arguments name and returns the exit code.

    Keeps compiled programs for the next start. Prints each warning once, and an error that the
    user can fix without its traceback.

    Args:
        program: Name of the program, with which each message begins.
        dispatch: Runs a command from the other arguments and returns the exit code.
        arguments: Of the command line; None: of this process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # Orbax also logs unreadable checkpoints, which the warnings here name with a remedy.
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
            with compilation_cache.kept_in(cache_folder("compiled")):
                return dispatch(arguments)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in _EXTRA:
                raise
            raise SystemExit(
                f"{program}: error: the command line needs {error.name}, which is not installed; "
                "pip install 'dpoptax[train]'"
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
        print(f"The options are the config's fields: dpoptax {command} CONFIG --help lists them.")
        if not rest:
            print(
                f"dpoptax: error: {command} needs the path of a config, a Python file with "
                f"get_config(): dpoptax {command} CONFIG",
                file=sys.stderr,
            )
        return 0 if rest else 2
    from dpoptax.cli.commands import COMMANDS  # here, because help does not need them

    if command not in COMMANDS:
        raise unknown_name("command", command, COMMANDS)
    return COMMANDS[command](rest)

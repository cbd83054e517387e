"""Runs an experiment: `python -m experiments COMMAND`."""

import sys

from experiments.command_line import main

if __name__ == "__main__":
    sys.exit(main())

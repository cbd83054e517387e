"""Reads the version of the installed distribution."""

import importlib.metadata

__version__ = importlib.metadata.version("dpoptax")

"""Helpers for pytrees, traced programs, the compiler, figures and stored states."""

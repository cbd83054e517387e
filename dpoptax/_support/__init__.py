"""Helpers for pytrees, traced programs, the compiler, numbers in texts and stored states."""

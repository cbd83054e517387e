"""Helpers for arguments, pytrees, traced programs, the compiler, numbers in texts and states."""

"""Transcribes update rules of four papers' code, and measures their noise.

The rules follow measurements of the published code, not its source. `docs/results/released-code.md`
names the commits.
"""

"""Transcribes the update rules that four papers' code computes, and measures their noise.

The rules follow measurements of the published code, not its source. `docs/results/released-code.md`
names the commits.
"""

"""Recomputes figures of the papers, and compares their claims with the numbers.

A module has the computation of a study, its rows, and a finding for each claim. Nothing here needs
privacy: the gradients are synthetic, or the method has no proof.
"""

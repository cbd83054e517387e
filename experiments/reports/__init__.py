"""Writes the report on all papers, with a list of runs not made here."""

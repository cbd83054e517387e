"""Writes the report on all papers, with the estimated cost of runs not made here."""

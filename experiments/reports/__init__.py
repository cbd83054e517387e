"""Writes the report on all papers, with the estimated cost of the runs that were not made."""

"""Keeps pytest from looking for examples in the catalog, whose packages may be missing."""

collect_ignore = ["catalog"]

"""Writes the page on methods on images from the records of comparisons."""

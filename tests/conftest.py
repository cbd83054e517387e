"""What is in this folder and is no test."""

collect_ignore = ["make_reference.py"]

"""Turns doctest examples into code blocks; Markdown reads `>>>` as a quotation."""

import griffe


class Doctests(griffe.Extension):
    """Fences the lines from a `>>>` to the next empty line."""

    def on_object(self, *, obj, **kwargs):
        """Rewrites the docstring of a module, class, function or attribute."""
        del kwargs
        if obj.docstring and ">>> " in obj.docstring.value:
            obj.docstring.value = _fenced(obj.docstring.value)


def _fenced(text):
    lines, inside = [], False
    for line in text.split("\n"):
        begins = line.lstrip().startswith(">>> ")
        if begins and not inside:
            lines += ["", "```pycon"]
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line.strip() if inside and begins else line)
    return "\n".join([*lines, "```"] if inside else lines)

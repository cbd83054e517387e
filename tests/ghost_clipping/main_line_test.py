"""Tests that the developers' page lists the functions that compute a clipped sum."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import dpoptax

_ROOT = Path(dpoptax.__file__).parent
_PAGE = _ROOT.parent / "docs" / "developers" / "ghost-clipping.md"


def _loss(params, example):
    hidden = jax.nn.relu(example @ params["w1"] + params["b1"])
    return jnp.sum((hidden @ params["w2"] + params["b2"]) ** 2)


def _entered():
    """Returns the file and name of each function of the library, in the order of first entry."""
    params = {"w1": jnp.ones((5, 7)), "b1": jnp.ones(7), "w2": jnp.ones((7, 3)), "b2": jnp.ones(3)}
    found = {}

    def record(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(_ROOT)):
            name = code.co_qualname.removeprefix("clipped_grad.<locals>.").split("<locals>.")[-1]
            found[str(Path(code.co_filename).relative_to(_ROOT)), name] = None

    previous = sys.getprofile()
    sys.setprofile(record)
    try:
        jax.eval_shape(dpoptax.clipped_grad(_loss, 1.0), params, jnp.ones((4, 5)))
    finally:
        sys.setprofile(previous)
    return list(found)


def test_functions_are_entered_in_order_of_the_page():
    text = _PAGE.read_text("utf-8")
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.+?) \|", text, re.MULTILINE)
    listed = [
        (file if file.startswith("_") else f"_ghost_clipping/{file}", name)
        for file, names in rows
        for name in re.findall(r"`([\w.]+)`", names)
    ]
    entered = _entered()
    assert [each for each in entered if each in listed] == listed
    functions, files = map(int, re.search(r"These (\d+) functions in (\d+) files", text).groups())
    assert (functions, files) == (len(listed), len({file for file, _ in listed}))

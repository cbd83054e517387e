"""The plan of a private run inside of a trainer, and checks of its rows and files."""

import struct

import jax
import numpy as np
import optax

import dpoptax

KEY = jax.random.key(3)
OPTIONS = (
    {"precision": "bfloat16"},
    {"microbatch_size": 4, "method": "recompute"},
)  # each changes rounding


def make_plan(*, steps, **options):
    run = {"dataset_size": 100, "batch_size": 10, "noise_multiplier": 1.0, "seed": 5}
    return dpoptax.PrivacyPlan(**{**run, "steps": steps, **options})


def make_chain(plan, *, key=KEY, methods=()):
    return optax.chain(plan.noise(key), *methods, optax.adam(1e-2))


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


class CountedRows:
    """Counts how often each row was read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.reads = array, array.shape, array.dtype, []

    def __getitem__(self, indices):
        self.reads.append(np.asarray(indices))
        return self.array[indices]


def occurrences(numbers, folder, text):
    """Returns where numbers occur in files or in a text, in binary or with six digits."""
    found = []
    files = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for name, content in {**files, "the log": text.encode()}.items():
        for x in numbers:
            forms = struct.pack("<f", x), struct.pack("<d", x), f"{x:.7g}"[:7].encode()
            found += [name for form in forms if form in content]
    return found

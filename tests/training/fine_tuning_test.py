"""Tests of fine-tuning by the trainer, from published files to the summary."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

from dpoptax.sampling import FixedSizeSampler
from dpoptax.training import (
    MLP,
    PlainPlan,
    Task,
    classification,
    config_of,
    load_params,
    train_and_evaluate,
)
from dpoptax.training.data import Dataset
from dpoptax.training.planning import plan_run, text
from experiments.config import ExperimentConfig
from experiments.models.language import Gpt2
from tests.published_texts import write_glue, write_published_model

CONFIGS = Path(__file__).parents[2] / "configs" / "papers"
SHORT = {
    "seed": 0,
    "steps": 2,
    "batch_size": 4,
    "sequence_length": 12,
    "epsilon": None,
    "delta": 1e-3,
    "noise_multiplier": 1.0,
    "accountant": "rdp",
    "lora_rank": 2,
    "learning_rate": 1e-2,
    "optimizer": "adamw",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_published_model(folder / "roberta")
    write_glue(folder, "sst2")
    return folder


def config_for(folder, dataset, **changes):
    return ExperimentConfig(
        dataset=dataset,
        data_dir=folder,
        model="roberta_base",
        pretrained=folder / "roberta",
        **{**SHORT, **changes},
    )


@pytest.fixture(scope="module")
def fine_tuned(folder, tmp_path_factory):
    """A run on sentences, with its own copy of the published weights."""
    workdir = tmp_path_factory.mktemp("fine_tuned")
    shutil.copytree(folder / "roberta", workdir / "model")
    config = config_of(config_for(folder, "sst2", seed=3), pretrained=workdir / "model")
    return config, workdir, train_and_evaluate(config, workdir / "run", progress=False)


@pytest.mark.slow
def test_fine_tunes_on_sentences(fine_tuned):
    _, workdir, summary = fine_tuned
    assert summary["private"]
    assert 0 <= summary["test_accuracy"] <= 1
    assert "test_perplexity" not in summary
    params = load_params(workdir / "run" / "params.msgpack")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    assert summary["num_params"] == sum(leaf.size for _, leaf in leaves)
    assert all("lora_" in str(path) or "head_" in str(path) for path, _ in leaves)
    assert json.loads((workdir / "run" / "summary.json").read_text())["config"]["pretrained"]


@pytest.mark.slow
def test_training_on_tokens_lowers_their_perplexity(tmp_path):
    rows = np.arange(20)[:, None] + np.arange(10)  # each token follows from the one before
    split = {"inputs": rows[:, :-1] % 12, "labels": rows[:, 1:] % 12}

    def tokens(steps: int = 40, seed: int | None = None) -> Task:
        plan = PlainPlan(FixedSizeSampler(20, 8), steps)
        model = Gpt2(12, 8, 1, 2, 16, 9)
        data = Dataset("rows", split, split, 0)
        options = {"optimizer": optax.adam(0.03), "eval_every": 20, "seed": seed}
        return classification(model, data, plan, **options)

    train_and_evaluate(config_of(tokens, seed=0), tmp_path, progress=False)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    perplexities = [json.loads(line)["test_perplexity"] for line in lines]
    assert perplexities[-1] < 0.5 * perplexities[0]


@pytest.mark.slow
def test_evaluates_streamed_test_split_in_chunks(tmp_path):
    images = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    records = [{"inputs": x, "labels": np.int32(i % 3)} for i, x in enumerate(images)]

    def streamed(steps: int = 2) -> Task:
        plan = PlainPlan(FixedSizeSampler(9, 4), steps)
        data = Dataset("records", records, records, 3)
        model = MLP(3, widths=())
        # Nine images are not a multiple of two.
        return classification(model, data, plan, optimizer=optax.sgd(0.1), microbatch_size=2)

    summary = train_and_evaluate(config_of(streamed), tmp_path, progress=False)
    assert summary["test_accuracy"] * 9 == pytest.approx(round(summary["test_accuracy"] * 9))


@pytest.mark.slow
def test_plan_needs_neither_data_nor_checkpoint():
    config = ExperimentConfig(
        dataset="sst2",
        model="roberta_base",
        batch_size=1000,
        lora_rank=16,
        epsilon=None,
        noise_multiplier=1.0,
        accountant="rdp",
        steps=10,
    )
    cost = plan_run(config.task(), count_flops=False)
    # Twelve layers with corrections of query and value, and a two-class head.
    assert cost.num_params == 12 * 2 * 2 * 768 * 16 + 768 * 768 + 768 + 768 * 2 + 2
    assert cost.num_params + cost.num_frozen == 124_647_170 + 12 * 2 * 2 * 768 * 16
    assert cost.task.plan.sampler.dataset_size == 67_349
    assert f"{cost.num_params:,} trained, {cost.num_frozen:,} frozen" in text("sst2", cost)


@pytest.mark.slow
def test_refuses_to_resume_with_other_frozen_weights(fine_tuned):
    """LoRA's gradients depend on the frozen weights, which checkpoints do not store."""
    config, folder, _ = fine_tuned
    workdir = folder / "run"
    train_and_evaluate(config, workdir, progress=False)

    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: 1.01 * tensor for name, tensor in tensors.items()}, path)
    with pytest.raises(ValueError, match=r"must be the same as in the first"):
        train_and_evaluate(config, workdir, progress=False)
    save_file(tensors, path)
    stated = folder / "model" / "config.json"
    stated.write_text(json.dumps(json.loads(stated.read_text()) | {"layer_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match=r"must be the same as in the first"):
        train_and_evaluate(config, workdir, progress=False)

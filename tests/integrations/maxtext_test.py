"""Tests private training of MaxText's models. They need MaxText."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("maxtext", reason="MaxText is not installed: see docs/developers/testing.md")

import maxtext
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.trainers.post_train.sft import train_sft
from maxtext.utils import maxtext_utils, model_creation_utils

import dpoptax
from dpoptax.integrations.tunix import guarantee, plan_batches
from experiments import maxtext_sft

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
STEPS, WORDS, LENGTH = 3, 64, 8
SETTINGS = {
    "run_name": "test", "model_name": "default", "base_emb_dim": 32, "base_num_query_heads": 2,
    "base_num_kv_heads": 2, "base_mlp_dim": 64, "base_num_decoder_layers": 2, "head_dim": 16,
    "vocab_size": WORDS, "max_target_length": LENGTH, "per_device_batch_size": 4, "steps": STEPS,
    "packing": "false", "enable_checkpointing": "false", "gradient_clipping_threshold": 0,
    "attention": "dot_product", "skip_jax_distributed_system": "true", "hardware": "cpu",
    "dtype": "float32", "dataset_type": "synthetic", "enable_goodput_recording": "false",
    "monitor_goodput": "false", "learning_rate": 1e-2,
}  # fmt: skip


@pytest.fixture
def make_config(tmp_path):
    def make(**changes):
        file = Path(maxtext.__file__).parent / "configs/post_train/sft.yml"
        settings = SETTINGS | {"base_output_directory": tmp_path} | changes
        return pyconfig.initialize_pydantic(
            ["", str(file), *(f"{name}={value}" for name, value in settings.items())]
        )

    return make


def make_plan(**options):
    run = {"dataset_size": 40, "batch_size": 4, "steps": STEPS, "noise_multiplier": 1.0}
    return dpoptax.PrivacyPlan(**run, **options)


def make_rows():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, WORDS, (40, LENGTH + 1))
    tokens[:, 6:] *= rng.integers(0, 2, (40, 1))  # some texts are shorter
    return maxtext_sft.make_rows(tokens, np.arange(LENGTH + 1) >= 2)


def train_by_hand(config, plan, key):
    """Returns the parameters after a loop that uses no trainer."""
    run = plan.new_run(key)
    model, mesh = model_creation_utils.from_pretrained(config)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        schedule = maxtext_utils.create_learning_rate_schedule(config)
        chain = optax.chain(run.noise(), optimizers.get_optimizer(config, schedule, model))
        nnx.pop(model, nnx.Intermediate)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        params = nnx.as_pure(params)

        def loss_fn(params, row):
            data = jax.tree.map(lambda x: x[None], row)
            own = nnx.merge(graph, params, rest)
            return train_sft.loss_fn(own, config, data, None, None, is_train=True)[0]

        @jax.jit
        def step(params, opt_state, rows, mask):
            grads = dpoptax.clipped_grad(loss_fn, 1.0)(
                dpoptax.gradient_points(opt_state, params), rows, mask
            )
            updates, opt_state = chain.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        opt_state = chain.init(params)
        for batch in run.batches(make_rows()):
            params, opt_state = step(params, opt_state, batch.examples, batch.mask)
    return params


def test_equals_loop_by_hand(make_config):
    config, plan, key = make_config(), make_plan(), jax.random.key(0)
    trainer, mesh = maxtext_sft.make_trainer(config, plan, key=key)
    first = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(trainer.model, nnx.Param)))
    maxtext_sft.train(config, trainer, mesh, plan_batches(plan, make_rows()))
    got = nnx.as_pure(nnx.state(trainer.model, nnx.Param))
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), got, first)
    assert all(jax.tree.leaves(moved))
    assert guarantee(trainer).releases[0].number == STEPS
    want = train_by_hand(config, plan, key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), got, want)
    with pytest.raises(ValueError, match="`training_hooks` must not be set"):
        trainer.with_training_hooks(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": "true"}, "`packing` must be off, got True"),
        ({"gradient_clipping_threshold": 1.0}, "`gradient_clipping_threshold` must be off"),
        ({"num_experts": 2, "base_moe_mlp_dim": 64}, "`num_experts` must be off, got 2"),
    ],
)
def test_refuses(make_config, changes, message):
    with pytest.raises(ValueError, match=message):
        maxtext_sft.check_config(make_config(**changes))

"""Models of the package `gemma`."""

import jax
import jax.numpy as jnp
from gemma import gm, peft

from tests.models.catalog import Model, cross_entropy, texts


def _network():
    local, everywhere = gm.nn.config.AttentionType.LOCAL_SLIDING, gm.nn.config.AttentionType.GLOBAL
    config = gm.nn.config.TransformerConfig(
        num_embed=256,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(local, everywhere),
        sliding_window_size=8,
    )
    return gm.nn.Transformer(config=config, dtype=jnp.float32, tokens="batch.input")


def transformer() -> Model:
    """Returns a Gemma 3 with 2 layers of width 64, a local one and a global one."""
    network = _network()
    params = jax.jit(network.init)(jax.random.key(0), texts(1)[0, :-1])

    def loss_fn(params, text):
        return cross_entropy(network.apply(params, text[:-1]).logits, text[1:])

    return Model(loss_fn, params, texts)


def lora() -> Model:
    """Returns the same with frozen weights and LoRA of rank 4 in every product."""
    network = gm.nn.LoRA(rank=4, model=_network(), dtype=jnp.float32)
    params = jax.jit(network.init)(jax.random.key(0), texts(1)[0, :-1])["params"]
    frozen, trained = peft.split_params(params)
    # One factor of each pair is zero at first. Gradients of both are more of a test.
    trained = jax.tree.map(lambda x: x + 0.01, trained)

    def loss_fn(trained, text):
        merged = {"params": peft.merge_params(frozen, trained)}
        return cross_entropy(network.apply(merged, text[:-1]).logits, text[1:])

    return Model(loss_fn, trained, texts)

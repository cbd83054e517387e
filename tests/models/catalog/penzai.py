"""Models of Penzai."""

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import gpt_neox, llamalike_common

from tests.models.catalog import Model, cross_entropy, texts


def llama() -> Model:
    """Returns a Llama with grouped queries, 2 layers of width 64."""
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=2,
        query_head_multiplier=2,
        embedding_dim=64,
        projection_dim=16,
        mlp_hidden_dim=128,
        num_decoder_blocks=2,
        vocab_size=256,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
    )
    return _language_model(
        llamalike_common.build_llamalike_transformer(config, jax.random.key(0), name="model")
    )


def gpt_neox_scanned() -> Model:
    """Returns a GPT-NeoX whose 2 layers of width 64 are stacked and scanned."""
    config = gpt_neox.GPTNeoXTransformerConfig(
        num_attention_heads=4,
        embedding_dim=64,
        projection_dim=16,
        mlp_hidden_dim=128,
        num_decoder_blocks=2,
        vocab_size=256,
        activation_fn="gelu_exact",
        rope_subset_size=8,
        rope_wavelength=10_000,
        layernorm_epsilon=1e-5,
        parameter_dtype=jnp.float32,
        activation_dtype=jnp.float32,
        use_layer_stack=True,
    )
    return _language_model(gpt_neox.build_gpt_neox_transformer(config, jax.random.key(0)))


def _language_model(model) -> Model:
    unbound, params = pz.unbind_params(model, freeze=True)

    def loss_fn(params, text):
        logits = pz.bind_variables(unbound, params)(pz.nx.wrap(text[:-1]).tag("seq"))
        return cross_entropy(logits.unwrap("seq", "vocabulary"), text[1:])

    return Model(loss_fn, params, texts)

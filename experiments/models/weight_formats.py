"""Maps fields and tensors to their names in models published with `transformers`."""

import dataclasses
from typing import Any

import flax.linen as nn

from experiments.models.language import BertEncoder, Gpt2, RobertaClassifier


@dataclasses.dataclass(frozen=True)
class Format:
    """The published form of one kind of model.

    Attributes:
        model_type: Value of `model_type` in config.json.
        architecture: The class of `transformers` with this head.
        fields: Fields of the module, by their names in config.json.
        fixed: Other settings of config.json, with the only values that this code computes.
        names: Tensor names, without prefix, of the module's layers. "{}" is a number.
        prefix: Prefix of the names of all tensors of the body. Some files lack it.
        head: Prefix of the layers that are initialized if the file has none of their shape.
        unused: Pattern of the names of tensors that the model does not use.
        transposed: Whether projections are stored as (out, in).
    """

    model_type: str
    architecture: str
    fields: dict[str, str]
    fixed: dict[str, Any]
    names: dict[str, str]
    prefix: str
    head: str | None
    unused: str
    transposed: bool


_TOKEN_FIELDS = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden": "intermediate_size",
    "epsilon": "layer_norm_eps",
    "activation": "hidden_act",
    "vocab_size": "vocab_size",
    "positions": "max_position_embeddings",
    "types": "type_vocab_size",
    "padding": "pad_token_id",
}
_TOKEN_NAMES = {
    "layer": "encoder.layer.{}",
    "attention_output": "attention.output.dense",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "word_embeddings": "embeddings.word_embeddings",
    "position_embeddings": "embeddings.position_embeddings",
    "token_type_embeddings": "embeddings.token_type_embeddings",
    "embeddings_norm": "embeddings.LayerNorm",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_norm": "attention.output.LayerNorm",
    "output_norm": "output.LayerNorm",
}
"""Names of fields and tensors that published models derived from BERT share."""

FORMATS: dict[type[nn.Module], Format] = {
    RobertaClassifier: Format(
        model_type="roberta",
        architecture="RobertaForSequenceClassification",
        fields=_TOKEN_FIELDS,
        fixed={"position_embedding_type": "absolute", "is_decoder": False},
        names={
            **_TOKEN_NAMES,
            "head_dense": "classifier.dense",
            "head_output": "classifier.out_proj",
        },
        prefix="roberta.",
        head="classifier.",
        unused=r"lm_head\..*|(roberta\.)?(pooler\..*|embeddings\.position_ids)",
        transposed=True,
    ),
    BertEncoder: Format(
        model_type="bert",
        architecture="BertModel",
        fields=_TOKEN_FIELDS,
        fixed={"position_embedding_type": "absolute"},
        names=_TOKEN_NAMES,
        prefix="bert.",
        head=None,
        unused=r"(bert\.)?(pooler\..*|embeddings\.position_ids)",
        transposed=True,
    ),
    Gpt2: Format(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        fields={
            "vocab_size": "vocab_size",
            "width": "n_embd",
            "depth": "n_layer",
            "heads": "n_head",
            "hidden": "n_inner",
            "positions": "n_positions",
            "epsilon": "layer_norm_epsilon",
            "activation": "activation_function",
        },
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "tie_word_embeddings": True,
        },
        names={
            "word_embeddings": "wte",
            "position_embeddings": "wpe",
            "layer": "h.{}",
            "attention_norm": "ln_1",
            "query_key_value": "attn.c_attn",
            "attention_output": "attn.c_proj",
            "output_norm": "ln_2",
            "intermediate": "mlp.c_fc",
            "output": "mlp.c_proj",
            "final_norm": "ln_f",
        },
        prefix="transformer.",
        head=None,
        unused=r"lm_head\.weight|(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
        transposed=False,
    ),
}
"""The published form of each module that can start from a checkpoint."""

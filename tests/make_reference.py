"""Writes tests/data/{roberta,gpt2}: tiny checkpoints and the outputs of `transformers`.

The weights are random and saved in the library's published format. The outputs are the hidden
states of every layer and the logits, for a few rows of tokens (one of them padded).
Run it from the root as

    uv run --no-project --with torch --with transformers python tests/make_reference.py
"""

from pathlib import Path

import numpy as np
import torch
import transformers

DATA = Path(__file__).parent / "data"
LENGTH = 9
SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "layer_norm_eps": 1e-3,  # large enough to be visible
    "num_labels": 3,
}
"""Sizes of the encoders."""


def scrambled(model):
    """Returns `model` with different random weights in every layer, including biases and norms."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3 + (parameter.data.mean() > 0.5)
    return model.eval()


def write(name, model, inputs, **named):
    """Writes the checkpoint, and reference.npz with inputs, hidden states and logits."""
    named = {key: torch.tensor(value) for key, value in named.items()}
    with torch.no_grad():
        out = model(**named, output_hidden_states=True)
    folder = DATA / name
    model.save_pretrained(folder, safe_serialization=True)
    for extra in ("generation_config.json",):
        (folder / extra).unlink(missing_ok=True)
    np.savez_compressed(
        folder / "reference.npz",
        inputs=inputs,
        hidden=np.stack([state.numpy() for state in out.hidden_states]),
        logits=out.logits.numpy(),
    )


def main():
    """Writes both models."""
    rng = np.random.default_rng(0)
    roberta = transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(
            vocab_size=41,
            max_position_embeddings=LENGTH + 5,
            type_vocab_size=1,
            pad_token_id=1,
            **SIZES,
        )
    )
    tokens = rng.integers(2, 41, (3, LENGTH))
    tokens[1, 5:] = 1
    mask = (tokens != 1).astype(np.int64)
    write(
        "roberta",
        scrambled(roberta),
        tokens.astype(np.int32),
        input_ids=tokens,
        attention_mask=mask,
    )
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=37,
            n_embd=12,
            n_layer=2,
            n_head=3,
            n_positions=LENGTH + 2,
            layer_norm_epsilon=1e-3,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    tokens = rng.integers(0, 37, (3, LENGTH))
    write("gpt2", scrambled(gpt2), tokens.astype(np.int32), input_ids=tokens)


if __name__ == "__main__":
    main()

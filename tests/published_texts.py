"""Small texts, images and tokenizers in the published formats of the real ones."""

import csv
import json

import numpy as np

WORDS = (
    *("the", "food", "was", "good", "bad", "cheap", "“warm”", '"quoted"', "café", "near", "river"),
    *("and", "never", "again"),
)
GLUE_FILES = {"sst2": "SST-2", "qnli": "QNLI", "mnli": "MNLI", "qqp": "QQP"}


def sentence(rng, words=WORDS):
    """Returns a few words."""
    return " ".join(rng.choice(words, rng.integers(2, 9)))


def glue_rows(task, split, count, rng):
    """Returns header and rows of a task's file, with the columns of GLUE's archive."""
    if task == "sst2":
        return ["sentence", "label"], [[sentence(rng), str(i % 2)] for i in range(count)]
    if task == "qnli":
        labels = ("entailment", "not_entailment")
        rows = [[str(i), sentence(rng), sentence(rng), labels[i % 2]] for i in range(count)]
        return ["index", "question", "sentence", "label"], rows
    if task == "qqp":
        header = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
        rows = [
            [str(i), str(2 * i), str(2 * i + 1), sentence(rng), sentence(rng), str(i % 2)]
            for i in range(count)
        ]
        return header, rows
    labels = ("neutral", "entailment", "contradiction")
    votes = ["label1"] if split == "train" else [f"label{i}" for i in range(1, 6)]
    parses = [f"sentence{i}_{kind}" for kind in ("binary_parse", "parse") for i in (1, 2)]
    header = ["index", "promptID", "pairID", "genre", *parses, "sentence1", "sentence2"]
    rows = [
        [str(i), str(i), f"{i}e", "fiction", *["( a b )"] * 4, sentence(rng), sentence(rng)]
        + [labels[i % 3]] * (len(votes) + 1)
        for i in range(count)
    ]
    return [*header, *votes, "gold_label"], rows


def write_glue(folder, task, *, train=20, dev=6):
    """Writes a task's TSV files in the folder that GLUE uses; returns the rows."""
    folder = folder / GLUE_FILES[task]
    folder.mkdir(parents=True, exist_ok=True)
    rng, tables = np.random.default_rng(0), {}
    for split, count in (("train", train), ("dev", dev)):
        header, tables[split] = glue_rows(task, split, count, rng)
        name = "dev_matched.tsv" if (task, split) == ("mnli", "dev") else f"{split}.tsv"
        lines = ["\t".join(row) for row in (header, *tables[split])]
        (folder / name).write_bytes("\n".join([*lines, ""]).encode())
    return tables


def write_e2e(folder, *, train=20, dev=6):
    """Writes the CSV files of the E2E challenge; returns the pairs."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, splits = np.random.default_rng(1), {}
    for name, count in (("trainset", train), ("devset", dev)):
        splits[name] = [
            (f"name[The {sentence(rng, ['Mill', 'Inn'])}], near[Café {i}]", sentence(rng))
            for i in range(count)
        ]
        with open(folder / f"{name}.csv", "w", encoding="utf-8-sig", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            writer.writerows([("mr", "ref"), *splits[name]])
    return splits


def write_dart(folder, *, train=20, dev=6):
    """Writes the JSON files of DART, two annotations per tripleset; returns the entries."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, splits = np.random.default_rng(2), {}
    for name, count in (("train", train), ("dev", dev)):
        splits[name] = [
            {
                "tripleset": [["Mill", "FOOD", sentence(rng)], ["Mill", "AREA", "river"]],
                "subtree_was_extended": False,
                "annotations": [
                    {"source": "WikiTableQuestions_mturk", "text": sentence(rng)} for _ in range(2)
                ],
            }
            for _ in range(count // 2)
        ]
        (folder / f"dart-v1.1.1-full-{name}.json").write_text(json.dumps(splits[name]))
    return splits


def write_imagenet(folder, *, classes=4, train=5, val=2, size=(300, 260)):
    """Writes JPEG files in one folder per class, some of them gray; returns the class names."""
    from PIL import Image

    rng = np.random.default_rng(3)
    names = [f"n{1000 + i:08d}" for i in range(classes)]
    for split, count in (("train", train), ("val", val)):
        for number, name in enumerate(names):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for i in range(count):
                pixels = np.full((*size, 3), 60 * number + i, np.uint8)
                pixels[: size[0] // 2] = rng.integers(0, 255, 3)
                image = Image.fromarray(pixels).convert("L" if i == 1 else "RGB")
                image.save(folder / split / name / f"{name}_{i}.JPEG", quality=95)
    return names


def write_tokenizer(folder, *, encoder=True, whole=True):
    """Writes a byte-level BPE tokenizer like RoBERTa's or GPT-2's; returns the vocabulary size."""
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"] if encoder else ["<|endoftext|>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    if whole:
        tokenizer.save(str(folder / "tokenizer.json"))
    else:
        tokenizer.model.save(str(folder))
    return tokenizer.get_vocab_size()


def write_published_model(folder, *, encoder=True, width=8):
    """Writes a tiny random RoBERTa or GPT-2: config.json, model.safetensors and tokenizer."""
    from safetensors.numpy import save_file

    vocab = write_tokenizer(folder, encoder=encoder)
    rng, positions = np.random.default_rng(4), 130 if encoder else 128
    if encoder:
        config = {
            "model_type": "roberta",
            "hidden_size": width,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 2 * width,
            "max_position_embeddings": positions,
            "type_vocab_size": 1,
            "pad_token_id": 1,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
        }
        layer = "roberta.encoder.layer.0."
        projections = {
            **{f"attention.self.{name}": (width, width) for name in ("query", "key", "value")},
            "attention.output.dense": (width, width),
            "intermediate.dense": (2 * width, width),
            "output.dense": (width, 2 * width),
        }
        norms = [f"{layer}{name}.LayerNorm" for name in ("attention.output", "output")]
        norms.append("roberta.embeddings.LayerNorm")
        embeddings = "roberta.embeddings."
        shapes = {
            f"{embeddings}word_embeddings": (vocab, width),
            f"{embeddings}position_embeddings": (positions, width),
            f"{embeddings}token_type_embeddings": (1, width),
        }
    else:
        config = {
            "model_type": "gpt2",
            "n_embd": width,
            "n_layer": 1,
            "n_head": 2,
            "n_positions": positions,
        }
        layer = "transformer.h.0."
        projections = {
            "attn.c_attn": (width, 3 * width),
            "attn.c_proj": (width, width),
            "mlp.c_fc": (width, 4 * width),
            "mlp.c_proj": (4 * width, width),
        }
        norms = [f"{layer}ln_1", f"{layer}ln_2", "transformer.ln_f"]
        shapes = {"transformer.wte": (vocab, width), "transformer.wpe": (positions, width)}
    tensors = {f"{name}.weight": rng.normal(size=shape) * 0.02 for name, shape in shapes.items()}
    for name, shape in projections.items():
        tensors[f"{layer}{name}.weight"] = rng.normal(size=shape) * 0.1
        tensors[f"{layer}{name}.bias"] = np.zeros(shape[0 if encoder else 1])
    for name in norms:
        tensors |= {f"{name}.weight": np.ones(width), f"{name}.bias": np.zeros(width)}
    save_file(
        {name: tensor.astype(np.float32) for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocab}))

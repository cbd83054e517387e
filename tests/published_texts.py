"""Small texts, images and tokenizers in the published formats of the real ones."""

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


def write_tokenizer(folder):
    """Writes a byte-level BPE tokenizer like RoBERTa's; returns the vocabulary size."""
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def write_published_model(folder):
    """Writes a tiny random RoBERTa: config.json, model.safetensors and tokenizer."""
    import jax
    import jax.numpy as jnp

    from experiments.models.language import RobertaClassifier
    from experiments.models.pretrained import save_model

    sizes = {"width": 8, "depth": 1, "heads": 2, "hidden": 16, "positions": 130}
    model = RobertaClassifier(write_tokenizer(folder), num_classes=2, **sizes)
    save_model(folder, model, model.init(jax.random.key(4), jnp.zeros(4, int)))

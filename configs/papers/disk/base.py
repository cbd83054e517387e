"""DiSK's training from scratch on images: the bold values of its Table 2 on each data set."""

from dpoptax.training.config import TrainConfig

SIZES = {"mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}


def get_configs() -> dict[str, TrainConfig]:
    """B = 5000, C = 1 with automatic clipping, δ = 1/N^1.1, warm-up and cosine (C.1, C.2).

    E = 40 and η = 0.25 on MNIST, E = 80 and η = 0.005 on CIFAR. The paper trains with SGD and with
    Adam and does not say which where; the step sizes fit SGD on MNIST and Adam on CIFAR. It draws
    batches of a fixed size; here they are Poisson samples, whose ε is that of adding or removing
    one example (`sampling="fixed_size"` gives the paper's).
    """
    rows = {}
    for dataset, size in SIZES.items():
        grey = dataset == "mnist"
        rows[dataset] = TrainConfig(
            dataset=dataset,
            model="wrn_16_4" if dataset == "cifar100" else "cnn_5",
            steps=(40 if grey else 80) * size // 5000,
            batch_size=5000,
            microbatch_size=100,
            optimizer="sgd" if grey else "adam",
            learning_rate=0.25 if grey else 0.005,
            schedule="warmup_cosine",
            clip="auto_v",
            epsilon=8.0,
            delta=size**-1.1,
            eval_every=40,
        )
    return rows

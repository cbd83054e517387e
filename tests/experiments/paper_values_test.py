"""Tests that the configs have the values that the papers state, with references.

Rows are named as on the command line, without configs/papers and .py. A star matches any part.
"""

import fnmatch

import pytest

from experiments.data import PUBLISHED
from experiments.methods import coefficients
from tests.experiments.paper_configs_test import ROWS


def rounded(value):
    """Compares with a value that the paper prints with two digits."""
    return pytest.approx(value, rel=0.02)


def over(numerators, denominator):
    return tuple(value / denominator for value in numerators)


DISK_SCRATCH = {"batch_size": 5000, "clip": "auto_v", "l2_clip_norm": 1.0, "accountant": "rdp"}
DISK_FILTER = {"method": "Disk", "method.kappa": 0.7, "method.gamma": 0.5}
PMLF_ALL = {"l2_clip_norm": 1.0, "learning_rate": 0.5, "batch_size": 1000}
PMLF_MOMENTUM = {"method": "PMLF", "method.beta": 0.1, "method.length": 2}
GRAY = ((0.1,), (-0.9,))
COLOR = ((0.15, -0.05), (-0.9,))
FIRST_ORDER = (over((1, 1), 11), over((-9,), 11))

STATED = [
    ("DiSK, C.2", "disk/base:*", DISK_SCRATCH | {"schedule": "warmup_cosine"}),
    ("DiSK, Table 2", "disk/base:mnist", {"epochs": 40, "learning_rate": 0.25}),
    ("DiSK, Table 2", "disk/base:cifar*", {"epochs": 80, "learning_rate": 5e-3}),
    ("DiSK, Table 7", "disk/base:mnist", {"delta": rounded(5.5e-6)}),
    ("DiSK, Table 7", "disk/base:cifar*", {"delta": rounded(6.8e-6)}),
    ("DiSK, 5.2", "disk/figure_1:cifar100/*", {"model": "wrn_16_4"}),
    ("DiSK, 5.2", "disk/figure_1:[!c]*", {"model": "cnn_5"}),
    ("DiSK, 5.2", "disk/figure_1:cifar10/*", {"model": "cnn_5"}),
    ("DiSK, Table 2", "disk/figure_1:*/disk", DISK_FILTER | {"method.filter_gain": None}),
    ("published code", "disk/figure_1:*/disk_swapped", DISK_FILTER | {"method.filter_gain": 0.3}),
    ("DiSK, Figure 2(a)", "disk/figure_2_4:mnist/*", {"epsilon": 0.5, "model": "cnn_5"}),
    ("DiSK, Figure 2(b)", "disk/figure_2_4:cifar100/*", {"epsilon": 8.0, "model": "wrn_16_4"}),
    ("DiSK, Figure 4", "disk/figure_2_4:cifar10/*", {"epsilon": 4.0}),
    ("DiSK, C.3", "disk/figure_6:*", {"dataset": "cifar10", "model": "wrn_16_4"}),
    ("DiSK, C.3", "disk/figure_6:*/doppler", {"method": "Doppler", "filter": ((0.7,), (-0.3,))}),
    ("DiSK, C.1", "disk/figure_6:*", {"accountant": "rdp"}),
    ("DiSK, Figure 8", "disk/figure_8:*", {"dataset": "cifar10", "model": "cnn_5"}),
    ("DiSK, Figure 8(a)", "disk/figure_8:*/gamma-[!1]*", {"epsilon": 8.0}),
    ("DiSK, Figure 8(b)", "disk/figure_8:*/gamma-1/eps-*", {"method.gamma": 1.0}),
    ("DiSK, C.4", "disk/table_1_3:*lora", {"lora_rank": 16}),
    ("DiSK, C.4", "disk/table_1_3:*/kf_*", DISK_FILTER),
    ("DiSK, C.1", "disk/table_*:*", {"accountant": "rdp", "schedule": "cosine"}),
    ("DiSK, C.2", "disk/table_*:*", {"clip": "auto_v", "l2_clip_norm": 1.0}),
    ("script of Li et al.: no weight decay", "disk/table_*:*", {"optimizer": "adam"}),
    ("DiSK, Table 7", "disk/table_1_3:*/mnli/*", {"delta": rounded(6.3e-7)}),
    ("DiSK, Table 7", "disk/table_1_3:*/qnli/*", {"delta": rounded(4.8e-7)}),
    ("DiSK, Table 7", "disk/table_1_3:*/sst2/*", {"delta": rounded(4.9e-6)}),
    ("DiSK, Table 7", "disk/table_1_3:*/qqp/*", {"delta": rounded(7.6e-7)}),
    ("DOPPLER, Figure 3", "doppler/base:*", {"epsilon": 8.0}),
    ("DOPPLER, 6.1", "doppler/*:*mnist*", {"delta": 60_000**-1.1}),
    ("DOPPLER, 6.1", "doppler/figure_4:*", {"delta": 50_000**-1.1, "dataset": "cifar10"}),
    ("DOPPLER, 6.1", "doppler/table_3:mnli/*", {"delta": 392_702**-1.1}),
    ("DOPPLER, 6.2", "doppler/figure_2:*", {"steps": 4000, "epochs": 40, "model": "resnet_50"}),
    ("DOPPLER, Figure 7", "doppler/figure_3_7:*", {"epsilon": 8.0}),
    ("DOPPLER, Table 2", "doppler/figure_3_7:*/lp_dp_sgd", {"filter": FIRST_ORDER}),
    ("DOPPLER, 6.2", "doppler/figure_4:adam_bc/*", {"method.noise_corrected": True}),
    ("DOPPLER, Table 2", "doppler/figure_8_9:filter/none", {"filter": ((1.0,), ())}),
    ("DOPPLER, Table 2", "doppler/figure_8_9:filter/momentum", {"filter": GRAY}),
    ("DOPPLER, Table 2", "doppler/figure_8_9:filter/*first-order-1", {"filter": FIRST_ORDER}),
    (
        "DOPPLER, Table 2",
        "doppler/figure_8_9:filter/*first-order-2",
        {"filter": (over((3, -1), 11), over((-9,), 11))},
    ),
    (
        "DOPPLER, Table 2",
        "doppler/figure_8_9:filter/*second-order",
        {"filter": (over((1, 2, 1), 58), over((-92, 38), 58))},
    ),
    ("DOPPLER, Table 4", "doppler/figure_8_9:*-f1", {"filter": ((0.075, 0.025), (-0.9,))}),
    ("DOPPLER, Table 4", "doppler/figure_8_9:*-f2", {"filter": ((0.025, 0.075), (-0.9,))}),
    ("DOPPLER, Table 4", "doppler/figure_8_9:*-f3", {"filter": ((0.1, 0.1), (-0.8,))}),
    ("DOPPLER, Table 4", "doppler/figure_8_9:*-f4", {"filter": ((0.2, 0.2), (-0.6,))}),
    ("DOPPLER, Table 4", "doppler/figure_8_9:*-f5", {"filter": ((0.025, 0.05, 0.025), (-0.9,))}),
    ("DOPPLER, Table 4", "doppler/figure_8_9:*-f6", {"filter": ((0.025, 0.025), (-1.8, 0.85))}),
    ("DOPPLER, C.4", "doppler/figure_10_11:learning_rate/*", {"epochs": 150, "epsilon": 8.0}),
    ("DOPPLER, C.4", "doppler/figure_10_11:*", {"dataset": "cifar10", "delta": 50_000**-1.1}),
    ("DOPPLER, C.3", "doppler/table_3:*", {"model": "roberta_base"}),
    ("script of Li et al.", "doppler/table_3:sst2/*/dp_adam", {"batch_size": 1000, "epochs": 3}),
    ("script of Li et al.", "doppler/table_3:*/dp_adam", {"learning_rate": 5e-4}),
    ("DP-PMLF, appendix", "pmlf/*:*", PMLF_ALL),
    ("DP-PMLF, appendix", "pmlf/*:*mnist/*", {"delta": 1 / 60_000}),
    ("DP-PMLF, appendix", "pmlf/*:*cifar*/*", {"delta": 1 / 50_000}),
    ("DP-PMLF, appendix", "pmlf/base:*mnist", {"epochs": 25}),
    ("DP-PMLF, Table 1", "pmlf/table_1_3:*mnist/*", {"epochs": 25}),
    ("DP-PMLF, Table 1", "pmlf/table_1_3:cifar*/*", {"epochs": 50}),
    ("DP-PMLF, Figure 4", "pmlf/figure_3_5:figure_4/cifar*", {"epochs": 50}),
    ("DP-PMLF, appendix", "pmlf/table_1_3:*/pmlf", PMLF_MOMENTUM),
    ("DP-PMLF, appendix", "pmlf/table_1_3:*mnist/*/pmlf", {"filter": GRAY}),
    ("DP-PMLF, appendix", "pmlf/table_1_3:cifar*/pmlf", {"filter": COLOR}),
    ("DP-PMLF, Figure 1", "pmlf/figure_1:*", {"epochs": 100, "model": "cnn_5"}),
    ("DP-PMLF, Figure 1", "pmlf/figure_1:*", {"dataset": "cifar10"}),
    ("DP-PMLF, Figure 1(a)", "pmlf/figure_1:*/lp_dp_sgd", {"epsilon": 8.0, "method": "Doppler"}),
    ("DP-PMLF, Figure 1(b)", "pmlf/figure_1:*/inner_*", {"epsilon": 1.0, "method": "InnerOuter"}),
    ("DP-PMLF, Figure 2", "pmlf/figure_2:*", {"epsilon": 1.0, "dataset": "cifar10"}),
    ("DP-PMLF, appendix", "pmlf/figure_2:*", {"epochs": 20}),
    ("DP-PMLF, appendix", "pmlf/figure_2:*/pmlf", PMLF_MOMENTUM | {"filter": COLOR}),
    ("DP-PMLF, Figure 5", "pmlf/figure_3_5:figure_5/*", {"epochs": 100, "epsilon": 1.0}),
    ("DP-PMLF, Figure 5", "pmlf/figure_3_5:figure_5/*", {"model": "resnet_18"}),
    ("DP-PMLF, Figure 6", "pmlf/figure_6_7:*/beta-*", {"model": "cnn_5", "method.length": 2}),
    ("DP-PMLF, Figure 7", "pmlf/figure_6_7:*/k-*", {"model": "cnn_5", "method.beta": 0.1}),
    ("DP-PMLF, appendix", "pmlf/table_2:*", {"epochs": 20, "model": "roberta_base"}),
    ("DP-PMLF, appendix", "pmlf/table_2:sst2/*", {"delta": 1 / 67_349}),
    ("DP-PMLF, Table 4", "pmlf/table_4:*/filter-1", {"filter": ((0.4,), (-0.6,))}),
    ("DP-PMLF, Table 4", "pmlf/table_4:*/filter-2", {"filter": ((0.2, 0.2), (-0.6,))}),
    ("DP-PMLF, Table 4", "pmlf/table_4:*/filter-3", {"filter": ((0.5, -0.1), (-0.6,))}),
    ("DP-PMLF, Table 4", "pmlf/table_4:*/filter-4", {"filter": GRAY}),
    ("DP-PMLF, Table 4", "pmlf/table_4:*/filter-5", {"filter": ((0.05, 0.05), (-0.9,))}),
    ("DP-PMLF, Table 4", "pmlf/table_4:*/filter-6", {"filter": COLOR}),
    ("DP-PMLF, Table 4", "pmlf/table_4:*/filter-7", {"filter": ((0.05, 0.05), (-0.7, -0.2))}),
    ("DP-PMLF, Table 4", "pmlf/table_4:*/filter-8", {"filter": ((1.0,), ())}),
    ("GeoDP, VI-A", "geodp/*:*", {"l2_clip_norm": 0.1, "epsilon": None, "delta": 1e-5}),
    ("GeoDP, VI-C", "geodp/figure_5:*", {"steps": 350, "dataset": "mnist", "model": "linear"}),
    ("GeoDP, VI-D", "geodp/tables_2_3:*", {"epochs": 20}),
    ("GeoDP, Table II", "geodp/tables_2_3:table_2/*", {"dataset": "mnist", "model": "cnn_2"}),
    ("GeoDP, Table III", "geodp/tables_2_3:table_3/*", {"dataset": "cifar10", "model": "resnet_3"}),
]
"""Place in the paper, rows, and the values that all of them have."""

TABLE_6 = {0.5, 1.0, 2.0, 4.0, 8.0}
KAPPAS = {0.99, 0.9, 0.8, 0.7, 0.6, 0.5}
GLUE_BATCHES = {1024, 2048, 4096}
GRIDS = [
    ("DiSK, Table 6", "disk/figure_1:*", "epsilon", TABLE_6),
    ("DiSK, Figure 4", "disk/figure_2_4:cifar10/*", "model", {"cnn_5", "wrn_16_4", "vit_small"}),
    ("DiSK, Table 2", "disk/figure_8:*", "method.kappa", KAPPAS),
    ("DiSK, Table 2", "disk/figure_8:*", "method.gamma", {0.2, 0.3, 0.5, 1.0, 2.0, 3.0, None}),
    ("DiSK, Figure 8(b)", "disk/figure_8:*/eps-*", "method.kappa", KAPPAS),
    ("DiSK, Table 6", "disk/figure_8:*/gamma-1*", "epsilon", TABLE_6),
    ("DiSK, Table 3", "disk/table_1_3:*", "epsilon", {1.0, 6.7, None}),
    ("DOPPLER, Figure 3", "doppler/base:*", "dataset", {"mnist", "cifar10", "cifar100"}),
    (
        "DOPPLER, Figure 7",
        "doppler/figure_3_7:cifar10/*",
        "model",
        {"cnn_5", "vit_small", "resnet_50"},
    ),
    (
        "DOPPLER, Table 1",
        "doppler/figure_10_11:learning_rate/*",
        "learning_rate",
        {3e-3, 1e-3, 3e-4, 1e-4, 3e-5},
    ),
    ("DOPPLER, Table 1", "doppler/table_3:*_bc", "batch_size", GLUE_BATCHES),
    ("DOPPLER, Table 1", "doppler/table_3:*_bc", "learning_rate", {3e-4}),
    ("DOPPLER, Table 3", "doppler/table_3:*", "epsilon", {3.0, 8.0}),
    ("DP-PMLF, Tables 1 and 3", "pmlf/table_1_3:*", "epsilon", {1.0, 8.0}),
    ("DP-PMLF, Table 2", "pmlf/table_2:*", "epsilon", {1.0, 8.0}),
    ("DP-PMLF, Figure 2", "pmlf/figure_2:*", "model", {"vit_tiny", "resnet_18", "cnn_5"}),
    ("DP-PMLF, Figure 6", "pmlf/figure_6_7:*/beta-*", "method.beta", {0.1, 0.3, 0.5, 0.7, 0.9}),
    ("DP-PMLF, Figure 7", "pmlf/figure_6_7:*/k-*", "method.length", {2, 3, 4, 5, 6}),
    ("DP-PMLF, Figures 6 and 7", "pmlf/figure_6_7:*", "epsilon", {2.0, 4.0, 6.0, 8.0}),
    ("DP-PMLF, Table 4", "pmlf/table_4:*", "epsilon", {2.0, 4.0, 6.0, 8.0}),
    ("DP-PMLF, Table 4", "pmlf/table_4:*", "dataset", {"mnist", "cifar10"}),
]
"""Place in the paper, rows, a field, and all of its values in these rows."""

DP, SMALL, LARGE = "DPSGD", 8192, 16_384


def of_table(sigmas, *own):
    """Returns the rows of both tables, and a table's `own` pairs of β and batch, for each σ."""
    both = [(DP, None, SMALL, "l2"), (DP, None, LARGE, "l2"), ("GeoDP", 0.1, LARGE, "l2")]
    both += [(*m, LARGE, c) for m in ((DP, None), ("GeoDP", 0.1)) for c in ("auto_s", "psac")]
    rows = both + [("GeoDP", beta, batch, "l2") for beta, batch in own]
    return [(sigma, *row) for sigma in sigmas for row in rows]


GEODP = {
    "geodp/tables_2_3:table_2/": of_table((10.0, 1.0), (0.1, SMALL), (0.5, SMALL)),
    "geodp/tables_2_3:table_3/": of_table((0.1, 0.01), (1.0, SMALL), (1.0, LARGE)),
    "geodp/figure_5:a/": [
        (1.0, method, beta, batch, "l2")
        for batch in (4096, 2048)
        for method, beta in ((DP, None), ("GeoDP", 1.0))
    ],
    "geodp/figure_5:b/": [
        (10.0, method, beta, 2048, "l2")
        for method, beta in ((DP, None), ("GeoDP", 1.0), ("GeoDP", 0.5))
    ],
    "geodp/figure_5:c/": [
        (sigma, method, beta, 256, "l2")
        for sigma in (0.01, 0.1)
        for method, beta in ((DP, None), ("GeoDP", 1.0))
    ],
}
"""Rows of GeoDP's tables without other samplers, and curves: σ, method, β, batch, clip."""


def matching(pattern):
    names = [name for name in ROWS if fnmatch.fnmatchcase(name, pattern)]
    assert names, f"no row matches {pattern}"
    return names


def value(config, field):
    if field == "epochs":
        return config.steps * config.batch_size / PUBLISHED[config.dataset].train_size
    if field == "filter":
        return tuple(pytest.approx(part) for part in coefficients(config.method))
    if field == "method":
        return type(config.method).__name__
    for name in field.split("."):
        config = getattr(config, name)
    return config


def check(config, field, stated):
    found = value(config, field)
    if field == "epochs":  # the last batch is complete or omitted
        part = config.batch_size / PUBLISHED[config.dataset].train_size
        assert stated - part < found <= stated
    else:
        assert found == stated


@pytest.mark.parametrize(
    ("rows", "values"), [pytest.param(*rest, id=f"{place}: {rest[0]}") for place, *rest in STATED]
)
def test_configs_have_values_of_papers(rows, values):
    for name in matching(rows):
        for field, stated in values.items():
            check(ROWS[name], field, stated)


@pytest.mark.parametrize(
    ("rows", "field", "values"),
    [pytest.param(*rest, id=f"{place}: {rest[0]}, {rest[1]}") for place, *rest in GRIDS],
)
def test_configs_have_grids_of_papers(rows, field, values):
    found = {value(ROWS[name], field) for name in matching(rows)}
    assert found == values


@pytest.mark.parametrize("start", GEODP)
def test_geodp_has_exactly_the_rows_of_the_paper(start):
    found = [
        (row.noise_multiplier, value(row, "method"), getattr(row.method, "beta", None))
        + (row.batch_size, row.clip)
        for name in matching(f"{start}*")
        if (row := ROWS[name]).noise_multiplier
    ]
    assert sorted(found, key=repr) == sorted(GEODP[start], key=repr)
    (free,) = (ROWS[name] for name in matching(f"{start}sigma-0/*"))
    assert (free.noise_multiplier, value(free, "method")) == (0.0, DP)


def test_every_file_has_stated_values():
    files = {name.split(":")[0] for name in ROWS}
    assert files == {name.split(":")[0] for _, rows, _ in STATED for name in matching(rows)}

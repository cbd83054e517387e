"""`dpoptax study`: figures and numbers on disk, computed once, claims read off the numbers."""

import csv

import matplotlib.image
import numpy as np
import pytest

from dpoptax.cli.main import main
from dpoptax.papers import study, study_doppler, study_tables

CHEAP = ("filters", "kalman-gain", "noisy-regression")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("studies")
    return workdir, study.run_studies(CHEAP, workdir, seeds=2, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAP)
def test_a_study_leaves_numbers_a_figure_and_findings(written, name):
    workdir, found = written
    with open(workdir / f"{name}.csv", newline="") as file:
        assert file.readline().startswith("# {")
        assert len(list(csv.DictReader(file))) > 100
    image = matplotlib.image.imread(workdir / f"{name}.png")
    assert image.shape[1] >= 1200
    assert np.ptp(image[..., :3]) > 0.5
    text = (workdir / f"{name}.md").read_text()
    assert all(finding.claim in text for finding in found[name])


def test_the_findings_are_those_of_the_readme(written):
    _, found = written
    assert [finding.holds for finding in found["noisy-regression"]][0] == "yes"
    assert [finding.holds for finding in found["noisy-regression"]][1] != "no"
    assert {finding.holds for finding in found["kalman-gain"]} == {"yes"}


@pytest.mark.slow
def test_numbers_of_the_same_code_are_not_computed_twice(written, monkeypatch):
    workdir, found = written

    def refuse():
        raise AssertionError("computed again")

    for name in CHEAP:
        changed = study.STUDIES[name]._replace(parts=lambda seeds: [refuse])
        monkeypatch.setitem(study.STUDIES, name, changed)
    assert study.run_studies(CHEAP, workdir, seeds=2, progress=False) == found
    with pytest.raises(AssertionError, match="again"):
        study.run_studies(CHEAP, workdir, seeds=3, progress=False)
    monkeypatch.setattr(study.records, "source_sha256", lambda: "other code")
    with pytest.raises(AssertionError, match="again"):
        study.run_studies(CHEAP, workdir, seeds=2, progress=False)


def test_a_stopped_study_goes_on_with_the_next_part(tmp_path, monkeypatch):
    started = []

    def part(index):
        def compute():
            started.append(index)
            if len(started) == 2:
                raise KeyboardInterrupt
            return study_doppler.filters(1)[0]() if index == 0 else [{"table": 0.0}]

        return compute

    stub = study.STUDIES["filters"]._replace(parts=lambda seeds: [part(0), part(1)])
    monkeypatch.setitem(study.STUDIES, "filters", stub)
    with pytest.raises(KeyboardInterrupt):
        study.run_studies(["filters"], tmp_path, progress=False)
    study._rows("filters", stub, tmp_path / "filters.csv", 5, study.tqdm(disable=True))
    assert started == [0, 1, 1]


def test_a_verdict_is_read_off_the_numbers():
    assert study_tables.verdict(True, [True, True]) == "yes"
    assert study_tables.verdict(np.array([True, False])) == "in part"
    assert study_tables.verdict([False]) == "no"


def test_the_command_prints_the_findings(tmp_path, capsys):
    assert main(["study", "filters", "--workdir", str(tmp_path)]) == 0
    assert "damped" in capsys.readouterr().out
    assert main(["study", "filtres", "--workdir", str(tmp_path)]) == 2
    assert "available: correlated-noise, filters" in capsys.readouterr().err
    assert main(["study", "filters", "--seeds", "0", "--workdir", str(tmp_path)]) == 2
    assert "seeds=0" in capsys.readouterr().err

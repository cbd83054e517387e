"""Tests of release metadata: versions and addresses are defined once."""

import pathlib
import re
import tomllib

import dpoptax

ROOT = pathlib.Path(__file__).parents[2]
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
READ = ("*.md", "*.yml", "*.cff", "docs/**/*.md", "notebooks/*.ipynb", "dpoptax/**/*.py")


def test_project_addresses_match_metadata():
    hosts = re.compile(
        r"https://[\w.]*(?:github|readthedocs)[\w.]*/(?:github/)?[\w./-]*dpoptax[\w./-]*"
    )
    allowed = tuple(url.split("//")[1] for url in URLS.values())
    repository = URLS["Repository"].removeprefix("https://github.com/")
    found = 0
    for pattern in READ:
        for path in ROOT.glob(pattern):
            for address in hosts.findall(path.read_text()):
                found += 1
                assert repository in address or any(url in address for url in allowed), (
                    path,
                    address,
                )
    assert found > 3


def test_version_is_that_of_installed_distribution():
    assert re.match(r"\d+\.\d+", dpoptax.__version__)

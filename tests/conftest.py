"""What is in this folder and is no test, and what all tests have around them."""

import os

import pytest

collect_ignore = ["make_reference.py"]


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory):
    """Commands that tests run keep what they compile here, and not in the user's cache folder."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before

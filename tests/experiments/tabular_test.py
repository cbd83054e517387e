"""Tests that the seeds change the code of the page on a table of customers."""

import re

import numpy as np
import pytest

from experiments import tabular

PAGE = """
```python
seed = 0
public = None, np.array([0.0, seed])
```

```python
scores = {"one": (seed / 10, 0.5, 0.06, 0.01)}
```

```python
raise AssertionError("it stops at the scores")
```
"""


def test_page_has_the_mean_over_seeds(tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    path.write_text(PAGE.replace("seed = 0\n", "import numpy as np\nseed = 0\n"), "utf-8")
    monkeypatch.setattr(tabular, "PAGE", path)
    found = tabular.tabular_page(seeds=3)
    spread = np.std([0.0, 0.1, 0.2], ddof=1)
    row = f"| one | 0.100 ± {spread:.3f} | 0.5000 ± 0.0000 | 6.00 ± 0.00 | 1.00 ± 0.00 |"
    assert row in re.sub(" +", " ", found)
    assert "Of the test rows, 50.00 ± 50.00 % are positive." in found
    path.write_text("no code", "utf-8")
    with pytest.raises(ValueError, match="must compute `scores`"):
        tabular.run_page(0)


def test_page_has_one_seed():
    assert tabular.PAGE.read_text("utf-8").count("\nseed = 0\n") == 1

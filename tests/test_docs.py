"""Programs in the documentation run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["docs/claiming.md", "README.md"]


def programs(page: str) -> str:
    """The Python of a page, but for what needs a training cluster."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.M)
    return "\n".join(block for block in blocks if "Worker" not in block)


@pytest.mark.parametrize("page", PAGES)
def test_programs_of_a_page(page: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(programs(page))
    done = subprocess.run(
        [sys.executable, script],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr

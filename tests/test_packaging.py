"""The wheel holds all that the package reads at run time, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_is_the_package(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "tq_redis").rglob("*") if path.is_file()]
    assert packed == {str(f.relative_to(ROOT)) for f in files if "__pycache__" not in f.parts}
    assert "tq_redis/py.typed" in packed
    assert any(name.endswith(".lua") for name in packed)

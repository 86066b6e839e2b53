"""Tutorials run as they are written, and print what they say: here and on transfer_queue itself."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from benchmarks.peer import find_or_make

ROOT = Path(__file__).parent.parent
AT_WORK = ROOT / "tests" / "compat" / "tutorials_at_work.py"
INDEX = ROOT / "docs" / "tutorials" / "README.md"
PAGES = re.findall(r"^\| \[.*\]\((.*\.md)\)", INDEX.read_text(), re.MULTILINE)

RUN_S = 480
"""For all pages of one package; a minute on an idle machine."""

Printed = dict[str, list[str]]


@pytest.fixture(scope="module")
def printed_here(redis_url: str) -> Printed:
    """Page -> what its blocks printed on the drop-in."""
    namespace = f"test-{uuid.uuid4().hex[:12]}"
    queue = {"TQ_REDIS_URL": redis_url, "TQ_REDIS_NAMESPACE": namespace, "PYTHONPATH": str(ROOT)}
    return run(Path(sys.executable), "--drop-in", **queue)


@pytest.fixture(scope="module")
def printed_there() -> Printed:
    """The same on transfer_queue, in its own environment, which is made where there is none."""
    try:
        interpreter = find_or_make()
    except subprocess.SubprocessError as error:
        pytest.fail(f"transfer_queue could not be installed; pip says above why: {error}")
    return run(interpreter, PYTHONDONTWRITEBYTECODE="")


def run(interpreter: Path, *options: str, **variables: str) -> Printed:
    pages = [str(INDEX.parent / page) for page in PAGES]
    try:
        done = subprocess.run(
            [interpreter, AT_WORK, *options, *pages],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"Tutorials took more than {RUN_S} s: {error.stderr!r}")
    sys.stderr.write(done.stderr)
    return {Path(page).name: blocks for page, blocks in json.loads(done.stdout or "{}").items()}


def expected(page: str) -> list[str]:
    """What each block of a page is followed by; nothing, if no text follows."""
    text = (INDEX.parent / page).read_text()
    blocks = r"^```python\n.*?^```(?:\n\n```text\n(.*?)^```)?"
    return re.findall(blocks, text, re.DOTALL | re.MULTILINE)


def test_all_pages_are_in_the_index() -> None:
    assert {*PAGES, INDEX.name} == {path.name for path in INDEX.parent.iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(RUN_S + 60)
@pytest.mark.parametrize("page", PAGES)
def test_on_the_drop_in(page: str, printed_here: Printed) -> None:
    assert printed_here.get(page) == expected(page)


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S + 60)
@pytest.mark.parametrize("page", PAGES)
def test_on_transfer_queue(page: str, printed_there: Printed) -> None:
    assert printed_there.get(page) == expected(page)

"""Every other test of this folder, in a process that chose Triton's interpreter before Triton was imported."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
CONFIGURATION = FOLDER.parents[2] / "pyproject.toml"


def test_everything_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-c", CONFIGURATION, "-p", "no:cacheprovider", FOLDER]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout

"""How far a reader walks to follow one step: few functions, in few files.

In a process of its own, as what another test has traced or imported would not be entered again.
"""

import json
import os
import pathlib
import subprocess
import sys

PROGRAM = pathlib.Path(__file__).parents[1] / "support" / "walk.py"
# The most functions, files and calls of the package while a default step is traced once.
MOST = {"train_step": [100, 20, 420], "update": [80, 16, 330]}
# And the fewest that a step may have: with less, the program would see nothing.
FEWEST = [50, 10, 200]


def test_a_default_step_is_a_short_walk():
    # With one device, as a reader has. With several, other questions are asked of each leaf.
    one_device = os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, PROGRAM, "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=one_device,
    )
    walked = json.loads(done.stdout)
    assert walked.keys() == MOST.keys()
    for name, counts in walked.items():
        for fewest, count, most in zip(FEWEST, counts, MOST[name], strict=True):
            assert fewest <= count <= most, (name, counts)

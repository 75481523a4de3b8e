"""README and examples do what they say."""

import json
import os
import pathlib
import re
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import cases

import jaxscale
import jaxscale.flax
import jaxscale.presets

pytestmark = pytest.mark.standard_promotion

ROOT = pathlib.Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py"))
DRAWN = {  # the examples that print a table and write a picture, and words of that table
    "quickstart": ["float32", "float16", "scaled", "skipped", "flushed"],
    "rl": ["float32", "bfloat16", "float16", "KL", "reward", "skipped", "repeated", "lost"],
}


@cases("number", [2, len(BLOCKS)], fast=[2])
def test_readme_runs(number):
    names = {}
    for block in BLOCKS[:number]:  # each goes on from those before
        exec(compile(block, "README.md", "exec"), names)
    start = names["params"], names["opt_state"], names["batch"]
    params, opt_state, _ = names["my_step"](*start)
    assert opt_state.step_applied
    assert not np.array_equal(params["w"], start[0]["w"])


def test_readme_names_what_is_there():
    for name in set(re.findall(r"jaxscale\.([a-zA-Z_]+(?:\.\w+)?)", README)) - {"py"}:
        owner = jaxscale
        for part in name.split("."):
            owner = getattr(owner, part)
    for path in re.findall(r"`((?:examples|tests|jaxscale)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path
    mentioned = re.findall(r"examples/(\w+)\.py", README)
    assert {path.stem for path in EXAMPLES} == set(mentioned)


def test_readme_says_how_a_run_begun_with_plain_optax_goes_on():
    # As `test_a_run_goes_on_as_if_nothing_had_changed` does, with the same bits.
    ((there, back),) = re.findall(r"`opt_state = (tx\.init\(params\).*?)`; back: `(.*?)`", README)
    params, bare = jnp.ones(3), optax.adam(0.1)
    names = {"tx": jaxscale.loss_scaled(bare), "params": params, "old_state": bare.init(params)}
    names["opt_state"] = eval(there, names)
    assert names["opt_state"].inner_state is names["old_state"]
    assert eval(back, names) is names["old_state"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.stem not in DRAWN], ids=lambda path: path.stem
)
def test_example_runs(path):
    assert np.isfinite(runpy.run_path(str(path))["main"](3))
    assert not jax.config.jax_enable_x64


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_example_runs_end_to_end(name, tmp_path):
    # As a user runs it: it sets XLA flags of its own, before JAX is imported.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    picture = tmp_path / "picture.png"
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--steps", "3"]
    command += ["--seeds", "1"] if name == "rl" else []
    options = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    result = subprocess.run([*command, "--picture", str(picture)], **options)
    assert result.returncode == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    for word in DRAWN[name]:
        assert word in result.stdout
    if name == "rl":  # 8 times with rounding errors of random signs, 3 bits apart
        figures = json.loads(picture.with_suffix(".json").read_text())
        (half,), (bfloat,) = (figures[f]["RMS of log(ratio)"] for f in ("float16", "bfloat16"))
        assert bfloat > 3 * half > 0


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_has_help(path, monkeypatch, capsys):
    # In this process, as starting another takes as long as all of them.
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(path), run_name="__main__")
    assert exit_.value.code == 0
    option = "--picture" if path.stem == "gradients" else "--steps"  # the one trains nothing
    assert option in capsys.readouterr().out

"""README and examples do what they say."""

import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxscale
import jaxscale.flax
import jaxscale.presets

pytestmark = pytest.mark.standard_promotion

ROOT = pathlib.Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py"))


def test_readme_runs():
    names = {}
    for block in BLOCKS:  # the second goes on from the first
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


def test_readme_states_the_defaults():
    policy = jaxscale.DynamicLossScale()
    assert (policy.init_scale, policy.max_scale) == (2.0**15, 2.0**24)
    assert (policy.growth_interval, policy.min_scale) == (2000, 1)
    for figure in ("2**15", "(2000)", "2**24", "down to 1"):
        assert figure in README


def test_readme_states_the_oldest_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (line,) = (line for line in README.splitlines() if line.startswith("Status: "))
    assert f"License: {project['license']}." in line
    (python,) = re.findall(r"[\d.]+", project["requires-python"])
    jax_, _, optax_ = (each.partition(">=")[2] for each in project["dependencies"])
    (flax_,) = (each.partition(">=")[2] for each in project["optional-dependencies"]["flax"])
    _, versions = line.split("Oldest versions:")
    assert re.findall(r"\d+(?:\.\d+)+", versions) == [python, jax_, optax_, flax_]
    assert any(line[8:12] in each.lower() for each in project["classifiers"])


def test_readme_states_the_rule_of_the_quickstart():
    source = (ROOT / "examples" / "quickstart.py").read_text()
    assert "DynamicLossScale(growth_interval=5, max_scale=2.0**40)" in source
    assert "`growth_interval=5` and `max_scale=2**40`" in " ".join(README.split())


def test_a_run_begun_with_plain_optax_goes_on_and_back():
    (code,) = re.findall(r"`opt_state = (tx\.init\(params\)\._replace\(.*?\))`; back", README)
    assert "back: `opt_state.inner_state`" in README
    bare = optax.adam(0.1)
    tx = jaxscale.loss_scaled(bare)
    start = jnp.arange(1.0, 4.0)
    runs = []
    for is_scaled in ([False] * 6, [False, False, True, True, True, False]):
        params, opt_state = start, bare.init(start)
        for step, now in enumerate(is_scaled):
            before = step > 0 and is_scaled[step - 1]
            if now and not before:
                opt_state = eval(code, {"tx": tx, "params": params, "old_state": opt_state})
            if before and not now:
                opt_state = opt_state.inner_state
            grads = params * jnp.float32(step + 1)
            updates, opt_state = (tx if now else bare).update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        runs.append((params, opt_state))
    assert jax.tree.structure(runs[0]) == jax.tree.structure(runs[1])
    assert [leaf.tolist() for leaf in jax.tree.leaves(runs[0])] == [
        leaf.tolist() for leaf in jax.tree.leaves(runs[1])
    ]


def test_readme_has_two_commands():
    (block,) = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    commands = block.strip().splitlines()
    assert len(commands) == 2
    assert "examples/quickstart.py" in commands[0]
    assert commands[1].endswith("pytest -n2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.stem != "quickstart"], ids=lambda path: path.stem
)
def test_example_runs_and_is_short(path):
    # The one for many hosts has faults to show, and starts processes on one computer.
    assert len(path.read_text().splitlines()) < (180 if path.stem == "multi_host" else 100)
    result = runpy.run_path(str(path))["main"](3)
    assert np.isfinite(result)
    assert not jax.config.jax_enable_x64


@pytest.mark.slow  # the README's first command
def test_quickstart_runs_end_to_end(tmp_path):
    # As a user runs it: it sets XLA flags of its own, before JAX is imported.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    picture = tmp_path / "picture.png"
    command = [sys.executable, str(ROOT / "examples" / "quickstart.py"), "--steps", "3"]
    result = subprocess.run(
        [*command, "--picture", str(picture)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    for word in ("float32", "float16", "scaled", "skipped", "flushed"):
        assert word in result.stdout


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


RESULTS = ROOT / "tests" / "benchmarks" / "results"


def test_readme_states_what_autocast_was_measured_to_do():
    rows = json.loads((RESULTS / "autocast-cpu.json").read_text())["rows"]
    unrolled, scanned = (row["methods"] for row in rows[:2])
    for name in ("jaxscale.autocast", "jmp", "Flax dtype"):
        for methods in (unrolled, scanned):
            for way in ("forward", "backward"):
                assert methods[name][way]["half"] == methods[name][way]["products"]
        kept = unrolled[name]["kept_bytes"] / unrolled["float32"]["kept_bytes"]
        memory = [
            methods[name]["h100"]["temporary_bytes"] / methods["float32"]["h100"]["temporary_bytes"]
            for methods in (unrolled, scanned)
        ]
        (line,) = re.findall(rf"\| `?{name.replace('dtype', '`dtype=')}`? \|.*all.*", README)
        assert line.endswith(f"| {kept:.2f} | {memory[0]:.2f}; {memory[1]:.2f} |")
    text = " ".join(README.split())
    models = json.loads((RESULTS / "parity-cpu.json").read_text())["rows"]
    assert len(models) == 9
    assert "Nine small programs" in text
    exact, alone, scaled = (np.array(way["final"]) for way in models[0]["ways"].values())
    worse, near = alone.mean() / exact.mean() - 1, np.abs(scaled / exact - 1).max()
    assert f"ends {worse:.0%} above float32's error without a scale and within 0.03% with" in text
    assert 0.0002 < near <= 0.0003


def test_readme_states_what_the_adaptive_rule_did():
    replays = (ROOT / "tests" / "policies" / "traces" / "README.md").read_text()
    rows = [
        re.search(rf"\| \**`{name}\(\)`.* \| (\d+) \| ([\d.]+) \|", replays).groups()
        for name in ("AdaptiveLossScale", "presets.torch")
    ]
    (ours, mean), (theirs, their_mean) = rows
    text = " ".join(README.split())
    assert f"skipped {ours} steps where PyTorch's rule skipped {theirs}, at the same mean" in text
    assert abs(float(mean) - float(their_mean)) < 0.1
    for words in ("92,000 steps", "repeate?[ds] 4 (?:backward )?passes"):
        assert re.search(words, text), words
        assert re.search(words, " ".join(replays.split())), words


def test_readme_states_the_costs_that_were_measured():
    results = RESULTS
    rows = {
        (row["tree"], row["gradients"], row["clipped"]): row["methods"]
        for row in json.loads((results / "step-cpu.json").read_text())["rows"]
    }
    compiled = json.loads((results / "programs.json").read_text())["rows"]
    programs = compiled[0]
    assert (programs["target"], programs["layout"]) == ("H100", "optimizer alone")
    kernels = {name: report["kernels"] for name, report in programs["methods"].items()}
    table = re.search(r"\| \| float32 \| float16 .*\n\|---.*\n((?:\|.*\n)+)", README).group(1)
    names = ["jaxscale.train_step", "jaxscale.apply_gradients", "jaxscale optax wrapper"]
    names += ["Flax DynamicScale", "optax.apply_if_finite"]
    for name, line in zip(names, table.splitlines(), strict=True):
        ratios = [
            rows["gpt2", dtype, False][name]["to_bare"]["median"]
            for dtype in ("float32", "float16")
        ] + [kernels[name] / kernels["bare optax"]]
        assert line.strip("| ").split(" | ")[1:] == [f"{ratio:.2f}" for ratio in ratios], name
    transformer = json.loads((results / "transformer-cpu.json").read_text())["rows"][0]["methods"]
    whole, three_lines, flax, jmp = (
        f"{transformer[name]['to_bare']['median']:.2f}"
        for name in ("jaxscale.train_step", "jaxscale optax wrapper", "Flax DynamicScale", "jmp")
    )
    text = " ".join(README.split())
    assert f"takes {whole} times as long as with plain optax with `train_step`" in text
    assert f"and {three_lines} times with the three lines" in text
    assert f"(with Flax's `DynamicScale` {flax}, with jmp {jmp})" in text
    reports = {
        (row["devices"], row["width"]): row["methods"]
        for row in compiled
        if (row["target"], row["dtype"]) == ("TPU v5e", "float32") and row["layout"] != "pipeline"
    }
    names = ["bare optax", "jaxscale.train_step", "bare optax, clipped"]
    chip, pod = ([reports[each][name] for name in names] for each in ((1, 2048), (256, 2048)))
    moved = [[report["bytes_per_parameter"] for report in each] for each in (chip, pod)]
    assert f"a whole step moves {moved[1][1] / moved[1][0]:.2f} times the bytes of plain" in text
    assert f"On one chip it moves {moved[0][1] / moved[0][0]:.2f} times the bytes" in text
    assert moved[0][1] / moved[0][2] == pytest.approx(1, abs=0.01)  # "as with that"
    counts, bytes_ = [], []
    for report in pod:
        sizes = report["collectives"]["all-reduce"].items()
        counts.append(sum(number for _, number in sizes))
        bytes_.append(sum(int(size) * number for size, number in sizes))
    assert (counts[1], bytes_[1]) == (counts[2], bytes_[2])  # "as with"
    more = f"{bytes_[1] - bytes_[0]} bytes more in {counts[1] - counts[0]} messages"
    assert f"exchanges {more}, as with `optax.clip_by_global_norm`" in text

"""The environment of all tests: eight CPU devices, true float16, strict promotion."""

import importlib.metadata
import os
import platform

# Before JAX is imported. Without the second flag XLA on CPU keeps float32 between two
# float16 operations, and nothing would underflow.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_allow_excess_precision=false"
)
# A CPU with float16 of its own fuses and rounds it in another way; up to AVX2 none has it.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ["XLA_FLAGS"] += " --xla_cpu_max_isa=AVX2"
# Most of the time goes into compilation, a third of it into optimizations of LLVM. A run has them
# with a level in XLA_FLAGS.
if "_optimization_" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    # The newest JAX for Python 3.11 has two ways to make code of a fusion. The default takes more
    # than twice as long to compile. Other versions have one, and stop at this flag.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# On CPU each all-reduce that waits holds a thread, and there are as many as cores or devices:
# several at once in one program, and it may wait for ever. XLA takes their number from here.
os.environ.setdefault("NPROC", "128")

import itertools

import hypothesis
import jax
import pytest

# Of the README's command. The tests that also run in the other worlds of `.ci/tests` have a mark of
# their own.
LEFT_OUT = ("slow", "docs", "worlds")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run all tests")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "standard_promotion: dtypes promote as users have it"
    )
    config.addinivalue_line("markers", "slow: runs only with --slow")
    config.addinivalue_line(
        "markers", "docs: of what is written about the code; runs only with --slow"
    )
    config.addinivalue_line(
        "markers", "worlds: runs with --slow, and with each version of .ci/tests"
    )
    config.addinivalue_line(
        "markers", "device: a law that holds on any accelerator, and is run on one"
    )
    options = {"max_examples": 60 if config.option.slow else 20, "derandomize": True}
    hypothesis.settings.register_profile("ours", deadline=None, **options)
    hypothesis.settings.load_profile("ours")
    # Most of the time goes into compilation. What was compiled is kept, for the other worker and
    # for the next run; pytest's `--cache-clear` forgets it.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and hasattr(config, "cache"):
        compiled = config.cache.mkdir("compiled")
        jax.config.update("jax_compilation_cache_dir", str(compiled))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.hookimpl(tryfirst=True)  # before `-m slow` selects
def pytest_collection_modifyitems(config, items):
    if config.option.slow:
        return

    def is_left_out(item):
        return any(mark.name in LEFT_OUT for mark in item.iter_markers())

    config.hook.pytest_deselected(items=list(filter(is_left_out, items)))
    items[:] = itertools.filterfalse(is_left_out, items)


@pytest.fixture(autouse=True)
def promotion(request):
    """Strict promotion of dtypes and ranks, so that no cast in the package is implicit."""
    standard = request.node.get_closest_marker("standard_promotion")
    with (
        jax.numpy_dtype_promotion("standard" if standard else "strict"),
        jax.numpy_rank_promotion("allow" if standard else "raise"),
    ):
        yield


def pytest_terminal_summary(terminalreporter, config):
    """Whether slow tests were left out."""
    if not config.option.slow:
        terminalreporter.line(
            "Slow tests and tests of pages were left out; --slow runs them."
        )

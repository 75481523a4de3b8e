"""The site: its blocks run, its build is strict, and a browser finds what its pages refer to."""

import contextlib
import http.server
import importlib.util
import inspect
import json
import os
import pathlib
import pkgutil
import queue
import re
import shlex
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import cases

import jaxscale

# All in one process, which builds the site once.
pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.docs,
    pytest.mark.xdist_group("site"),
]

ROOT = pathlib.Path(__file__).parent.parent.parent
SITE = ROOT / ".github" / "site"
PAGES = {
    page.relative_to(SITE / "pages").with_suffix("").as_posix(): page
    for page in sorted((SITE / "pages").rglob("*.md"))
}


def load_hooks():
    """Loads what the build adds to mkdocs."""
    spec = importlib.util.spec_from_file_location("hooks", SITE / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


HOOKS = load_hooks()
# The test's own flags are for speed. The pages are what a user runs.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
OPTIONS = {"env": ENVIRONMENT, "cwd": ROOT, "capture_output": True, "text": True}


# The build of the site runs the blocks of all pages.
@cases("page", ["index"])
def test_the_blocks_of_a_page_run(page):
    HOOKS.run_blocks(PAGES[page].read_text(), page)


@pytest.mark.slow
def test_the_loop_of_the_page_makes_a_step():
    names = HOOKS.run_blocks(PAGES["plain_jax"].read_text(), "plain_jax")
    tx = jaxscale.loss_scaled(optax.adamw(1e-3))
    start = {"w": jnp.ones((4, 1))}
    batch = {"x": jnp.full((8, 4), 0.125), "y": jnp.zeros((8, 1))}
    names["tx"] = tx
    for name in ("my_step", "faster_step"):
        step = names[name].__wrapped__
        params, opt_state, loss = jax.jit(step)(start, tx.init(start), batch)
        assert opt_state.step_applied
        assert np.all(params["w"] < start["w"])
        assert loss == 0.25


def block(code, language="python"):
    return f"```{language}\n{code}\n```\n"


WRONG_BLOCKS = {
    "error": (block("1 / 0"), ZeroDivisionError, "division by zero"),
    "syntax": (block("x ="), SyntaxError, r"invalid syntax \(page, line 2\)"),
    "output": (
        block("print(1)") + "\n" + block("2", "text"),
        ValueError,
        r"printed\n1\n.*\n2\n",
    ),
    "second": (block("x = 1") + "\n" + block("x / 0"), ZeroDivisionError, "by zero"),
}


@cases("name", WRONG_BLOCKS)
def test_a_wrong_block_is_an_error(name):
    markdown, error, message = WRONG_BLOCKS[name]
    with pytest.raises(error, match=message):
        HOOKS.run_blocks(markdown, "page")


def test_blocks_go_on_from_each_other_and_text_is_output_only_right_after_a_block():
    page = block("no output", "text") + block("x = 1") + "words\n" + block("print(x)")
    page += block("1", "text") + "words\n" + block("2", "text")
    names = HOOKS.run_blocks(page, "page")
    assert names["x"] == 1


def test_each_block_is_one_that_runs():
    # In a block of another language, or of none, nobody would notice a broken program.
    languages = {"python", "text", "diff", "console"}
    for name, page in PAGES.items():
        fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
        assert set(fences[::2]) <= languages, name
        assert set(fences[1::2]) <= {""}, name


def test_a_power_is_not_bold():
    # Markdown prints what stands between two `2**15` in bold: write `2\*\*15`, or code.
    for page in [ROOT / "README.md", *PAGES.values()]:
        words = re.sub(r"(?ms)^```.*?^```$|`[^`]*`", "", page.read_text())
        assert not re.findall(r".{0,20}\d\*\*\d.*", words), page.name


def has_own_docstring(cls, method):
    """Returns whether a class has this method from itself, with a docstring."""
    function = inspect.unwrap(getattr(cls, method))
    if getattr(function, "__qualname__", "") != f"{cls.__name__}.{method}":
        return False
    return function.__module__.startswith("jaxscale") and function.__doc__


NAMES = {
    "jaxscale": set(jaxscale.__all__) - {"diagnostics", "flax", "nnx", "presets"},
    "jaxscale.diagnostics": jaxscale.diagnostics.__all__,
    "jaxscale.nnx": ["train_step"],
    "jaxscale.flax": jaxscale.flax.__all__,
    "jaxscale.presets": jaxscale.presets.__all__,
}


def public_names():
    """Yields all public names, and the methods that have a docstring of their own."""
    for module, names in NAMES.items():
        for name in names:
            yield f"{module}.{name}"
            value = pkgutil.resolve_name(f"{module}.{name}")
            if not inspect.isclass(value):
                continue
            for method in vars(value):
                if not method.startswith("_") and has_own_docstring(value, method):
                    yield f"{module}.{name}.{method}"


PUBLIC = set(public_names())


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds the site as CONTRIBUTING.md says, and returns its folder."""
    guide = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    (command,) = re.findall(r"^python (-m mkdocs build .*)$", guide, re.MULTILINE)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, *shlex.split(command), "--site-dir", str(folder)]
    result = subprocess.run(command, **OPTIONS)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.slow
def test_the_site_has_all_pages_and_the_reference_all_names(built):
    pages = [page.relative_to(built).with_suffix("") for page in built.rglob("*.html")]
    assert {str(page) for page in pages} - {"404"} == set(PAGES)
    anchors = set()
    for page in (built / "reference").glob("*.html"):
        anchors |= set(re.findall(r'<h\d id="(jaxscale[\w.]+)"', page.read_text()))
    assert anchors >= PUBLIC


@pytest.mark.slow
def test_backticks_in_a_docstring_lead_on_to_other_names(built):
    page = (built / "reference" / "flax.html").read_text()
    assert 'href="core.html#jaxscale.loss_scaled"' in page


@pytest.mark.slow
def test_an_example_in_the_reference_is_a_program_and_no_quotation(built):
    page = (built / "reference" / "core.html").read_text()
    assert "&gt;&gt;&gt; import jaxscale" not in page


WRONG_PAGE = """# Wrong

[a page](nothing.md), [a place](index.md#nothing), ![a picture](nothing.png), `jaxscale.nothing`,
`examples/nothing.py`, [a name][jaxscale.nothing_at_all]

```python
1 / 0
```
"""


@pytest.mark.slow
def test_a_build_fails_on_whatever_is_broken(tmp_path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text(WRONG_PAGE)
    changed = {"site_dir": str(tmp_path / "site"), "docs_dir": str(tmp_path / "pages")}
    changed |= {"strict": True, "nav": [{"Start": "index.md"}, {"Other": "missing.md"}]}
    program = (
        "import logging\nfrom mkdocs.commands.build import build\n"
        "from mkdocs.config import load_config\nlogging.basicConfig()\n"
        f"build(load_config({str(SITE / 'mkdocs.yml')!r}, **{changed!r}))"
    )
    result = subprocess.run([sys.executable, "-c", program], **OPTIONS)
    assert result.returncode != 0
    output = result.stdout + result.stderr
    for words in (
        "nothing.md",
        "#nothing",
        "nothing.png",
        "no jaxscale.nothing",
        "missing.md",
        "no examples/nothing.py",
        "'jaxscale.nothing_at_all'",
        "ZeroDivisionError",
    ):
        assert words in output, words


# What the browser runs on each page: it waits for pictures and for the results of a search.
LOOK = """
addEventListener("load", async () => {
  const wait = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
  const broken = [...document.images].filter((image) => image.naturalWidth === 0);
  const report = {
    page: location.pathname,
    links: [...document.querySelectorAll("a[href]")].map((link) => link.href),
    broken: broken.map((image) => image.src),
    pictures: document.images.length,
    found: [],
  };
  const wanted = new URLSearchParams(location.search).get("find");
  if (wanted) {
    document.querySelector("[data-md-toggle=search]").click();
    const field = document.querySelector("[data-md-component=search-query]");
    field.focus();
    field.value = wanted;
    for (let i = 0; i < 100 && report.found.length === 0; i++) {
      field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
      await wait(100);
      const results = document.querySelectorAll(".md-search-result__link");
      report.found = [...results].map((result) => result.href);
    }
  }
  const answer = await fetch("/report", { method: "POST", body: JSON.stringify(report) });
  const next = await answer.text();
  if (next) location = next;
});
"""


class Server(http.server.ThreadingHTTPServer):
    """Serves the site, and leads the browser from one address to the next."""

    def __init__(self, folder, addresses):
        self.folder = folder
        self.addresses = addresses
        self.reports = queue.Queue()
        self.missing = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, request, address, server):
        super().__init__(request, address, server, directory=str(server.folder))

    def answer(self, body, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        path = pathlib.Path(self.translate_path(self.path))
        if path.suffix == ".html" and path.is_file():
            script = f"<script>{LOOK}</script></body>"
            page = path.read_text().replace("</body>", script)
            self.answer(page.encode(), "text/html; charset=utf-8")
        else:
            super().do_GET()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.reports.put(json.loads(body))
        address = ""
        if self.server.addresses:
            address = self.server.addresses.pop(0)
        self.answer(address.encode(), "text/plain")

    def send_error(self, code, *args, **kwargs):
        self.server.missing.append(self.path)
        super().send_error(code, *args, **kwargs)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def browser(address, folder):
    """Opens an address in a headless Chromium."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    flags += " --disable-background-networking --disable-component-update"
    # Without a port for a debugger it ends at once.
    flags += f" --user-data-dir={folder} --remote-debugging-port=0"
    command = [shutil.which("chromium"), *flags.split(), address]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def serving(server):
    """Serves in a thread of its own until it is left."""
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def without_query(address):
    page, _, _ = address.partition("?")
    _, _, place = address.partition("#")
    return f"{page}#{place}"


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("chromium"), reason="there is no Chromium to open pages in"
)
def test_a_browser_finds_all_that_pages_refer_to(built, tmp_path):
    pages = [f"/{page.relative_to(built)}" for page in built.rglob("*.html")]
    addresses = [*pages, "/index.html?find=skip_nonfinite"]
    first, *others = addresses
    server = Server(built, others)
    root = f"http://127.0.0.1:{server.server_port}"
    reports = []
    with serving(server), browser(root + first, tmp_path):
        for _ in addresses:
            report = server.reports.get(timeout=120)
            reports.append(report)

    *page_reports, search_report = reports
    assert [report["page"] for report in page_reports] == pages
    assert server.missing in ([], ["/favicon.ico"])
    pictures = [report["pictures"] for report in reports]
    assert sum(pictures) >= 2  # those of `examples`
    results = [without_query(address) for address in search_report["found"]]
    assert f"{root}/reference/core.html#jaxscale.skip_nonfinite" in results

    links = set()
    for report in reports:
        assert report["broken"] == [], report["page"]
        links.update(link for link in report["links"] if link.startswith(root))
    assert len(links) > len(pages)
    for link in links:
        within_site = link.removeprefix(root)
        assert is_there(built, within_site), link


def is_there(built, link):
    """Returns whether a link within the site leads to a file, and to a place that it names."""
    address, _, place = link.partition("#")
    path, _, _ = address.partition("?")
    file = built / (path.lstrip("/") or "index.html")
    return file.is_file() and (not place or f'id="{place}"' in file.read_text())

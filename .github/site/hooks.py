"""Makes the build of the site fail on what is broken, and links names to the reference.

- Each block of Python on a page runs, in the order of the page and in one namespace. A `text` block
  right after it is what it must print. A build runs them; `mkdocs serve` does not.
- Each name that starts with `jaxscale.` must be there, and each file of the repository that a page
  names in backticks.
- A public name in backticks leads to its place in the reference.

What is broken is a warning, so that one build names all of it; `--strict` then fails.
"""

import contextlib
import html
import io
import logging
import pathlib
import pkgutil
import re
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parent.parent.parent
# Those of `examples`.
PICTURES = ("gradients.png", "half_params.png", "quickstart.png", "rl.png")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"(?<![\w./-])jaxscale(?:\.[A-Za-z_]\w*)+")
PATH = re.compile(r"`((?:examples|tests|jaxscale|\.github|\.ci)/[\w./-]+)`")
# Names in backticks, perhaps with arguments. Bare words such as `scale` are mostly arguments.
CODE = re.compile(r"<code>(?:jaxscale\.)?((?:\w+\.)*\w+)(\([^<]*\))?</code>")
# Headings, links, programs, and the names of arguments.
NOT_LINKED = re.compile(
    r"<h\d.*?</h\d>|<a .*?</a>|<pre.*?</pre>|<strong>.*?</strong>", re.DOTALL
)

log = logging.getLogger("mkdocs.hooks.jaxscale")
_is_build = True


class Block(NamedTuple):
    """A block of Python, and what it must print, `None` for anything."""

    line: int
    source: str
    expected: str | None


def find_blocks(markdown: str) -> list[Block]:
    """Returns the blocks of Python of a page, in order."""
    blocks: list[Block] = []
    end = 0
    for fence in FENCE.finditer(markdown):
        language, text = fence.groups()
        is_next = not markdown[end : fence.start()].strip()
        if language == "text" and blocks and is_next:
            blocks[-1] = blocks[-1]._replace(expected=text)
        if language == "python":
            blocks.append(Block(markdown.count("\n", 0, fence.start()) + 2, text, None))
        end = fence.end()
    return blocks


def run_blocks(markdown: str, name: str) -> dict[str, Any]:
    """Returns the namespace in which the blocks of a page ran, one after the other.

    Raises:
      ValueError: if a block prints something else than what the page shows.
    """
    # As a script has it: pickle, Flax and Equinox look for the module of a class.
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in find_blocks(markdown):
        printed = io.StringIO()
        # Blank lines, so that errors name the line of the page.
        source = "\n" * (block.line - 1) + block.source
        with contextlib.redirect_stdout(printed):
            exec(compile(source, name, "exec"), names)
        if block.expected is not None and printed.getvalue() != block.expected:
            raise ValueError(
                f"{name}, line {block.line}: the block printed\n{printed.getvalue()}and the page "
                f"shows\n{block.expected}"
            )
    return names


def find_broken_names(markdown: str) -> Iterator[str]:
    """Yields the names of the package and the files of the repository that are not there."""
    for name in sorted(set(NAME.findall(markdown))):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            yield name
    for path in sorted(set(PATH.findall(markdown))):
        if not (ROOT / path).exists():
            yield path


def on_startup(*, command: str, **_: Any) -> None:
    """Remembers whether this is a build."""
    global _is_build
    _is_build = command == "build"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pictures of the examples to the site."""
    from mkdocs.structure.files import File  # so that tests can run blocks without it

    for name in PICTURES:
        path = str(ROOT / "examples" / name)
        files.append(File.generated(config, f"pictures/{name}", abs_src_path=path))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Warns of names that are not there, and of blocks that do not run."""
    name = page.file.src_uri
    # A page names what went, and its own test evaluates it.
    broken_names = [] if name == "went.md" else find_broken_names(markdown)
    for broken in broken_names:
        log.warning("%s: there is no %s", name, broken)
    if _is_build:
        try:
            run_blocks(markdown, name)
        except Exception:
            log.warning("%s: a block does not run\n%s", name, traceback.format_exc())


def on_page_content(content: str, **_: Any) -> str:
    """Returns the page with links from public names to the reference."""
    parts, end = [], 0
    for kept in NOT_LINKED.finditer(content):
        parts += [CODE.sub(_link, content[end : kept.start()]), kept.group()]
        end = kept.end()
    return "".join([*parts, CODE.sub(_link, content[end:])])


def _link(code: re.Match[str]) -> str:
    """Returns a name in backticks with a link, which is left out if the reference has no such."""
    name, arguments = code.groups()
    is_said = "jaxscale." in code.group()
    # A word in lower case may be an argument, or a word of another library.
    if not (is_said or arguments or "_" in name or name != name.lower()):
        return code.group()
    target = html.escape(f"jaxscale.{name}")
    return f'<autoref identifier="{target}" optional>{code.group()}</autoref>'

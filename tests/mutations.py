"""Plants bugs in a copy of the project, one at a time, and checks that the tests notice.

Run by hand, from the top of the project; a bug takes some seconds to a minute:

    python tests/mutations.py                      # those of `CHOSEN`, some eighty
    python tests/mutations.py jaxscale/_step/retry.py   # in every function of a module
    python tests/mutations.py repeat_backward Scaled    # in a function, or in a class
    python tests/mutations.py --list repeat_backward    # only says which

It prints which test caught each, and exits with 1 if one was not caught. Nothing is quoted: a bug
is what an operator of `variants` makes of an expression, and what it is planted in goes by its
name, wherever it stands in the package; so do the tests.
"""

import argparse
import ast
import concurrent.futures
import copy
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = "jaxscale"
TIMEOUT = 600  # some bugs make a loop without an end, which is noticed, too

# The tests that must notice, the quickest first: of these functions, and of the others in their
# modules. What stands in no such module is left to the folder of tests that is named as its room,
# or to all tests where there is none.
CHOSEN = {
    "test_policies": "DynamicLossScale._after_finite DynamicLossScale._after_nonfinite "
    "DynamicLossScale._grown DynamicLossScale._lowered",
    "test_value_and_grad test_train_step": "scaled.Scaled",
    "test_verdict test_max_norm": "reduction.Reduction",
    "test_verdict test_max_norm test_skipped_spikes test_largest test_train_step test_options": (
        "verdict.judge verdict.agree_on_size"
    ),
    "test_accumulation test_overwrites test_errors": "Window.add Window.close",
    "test_optimizer test_inner test_options": "skip.step_if",
    "test_optimizer test_accumulation test_inner test_skipped_spikes test_max_norm test_overwrites "
    "test_options": "Wrapper.apply Wrapper._make_or_skip",
    "test_retries test_train_step test_decay": (
        "retry.repeat_backward retry._is_lower counters._count_backoffs"
    ),
}

# Mutants that do what the original does, by function and text: why nothing can notice.
EQUIVALENT = {
    ("agree_on_size", "0 -> 1  in  jnp.zeros(0, jnp.bool_)"): "a verdict more, which is dropped",
    ("judge", "wants_squares and seen is None -> wants_squares or seen is None"): (
        "squares that nobody asked for are dropped"
    ),
    ("repeat_backward", "len(types) - len(flat.arrays) -> len(types) + len(flat.arrays)"): (
        "the loop carries a scale state twice"
    ),
    ("_count_backoffs", "retries.number > 0 -> retries.number >= 0"): (
        "without a retry the scale of the pass is the one before it"
    ),
}

_OPERATORS = {
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
    (ast.BitAnd, ast.BitOr),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.Div),
}
_NAMES = {("min", "max"), ("minimum", "maximum"), ("all", "any"), ("pmin", "pmax")}
_NAMES |= {("logical_and", "logical_or"), ("bitwise_and", "bitwise_or")}
OPPOSITE = {a: b for pair in _OPERATORS | _NAMES for a, b in (pair, pair[::-1])}
SELECTIONS = ("where", "tree_where", "cond")
GUARDED = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def variants(node):
    """The bugs that can be made of a node of a syntax tree, each as a node in its place."""

    def changed(**fields):
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.Compare(ops=[op]) if type(op) in OPPOSITE:
            yield changed(ops=[OPPOSITE[type(op)]()])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in OPPOSITE:
            yield changed(op=OPPOSITE[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.Invert()):
            yield node.operand
        case ast.Constant(value=bool()):
            yield changed(value=not node.value)
        case ast.Constant(value=int() | float()):
            yield changed(value=node.value + 1)
        case ast.Name(id=name) if name in OPPOSITE:
            yield changed(id=OPPOSITE[name])
        case ast.Attribute(attr=name) if name in OPPOSITE:
            yield changed(attr=OPPOSITE[name])
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, a, b, *rest]):
            if name in SELECTIONS:
                yield changed(args=[first, b, a, *rest])
        case ast.IfExp() if not any(isinstance(op, ast.Is) for op in getattr(node.test, "ops", [])):
            yield changed(body=node.orelse, orelse=node.body)
        case ast.If(body=[last]) if isinstance(last, GUARDED):
            yield changed(test=ast.Constant(value=False))


def sites(node):
    """Where bugs may stand: below a node, but not in types, indices, text, or errors."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "slice"):
            continue
        for i, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, (ast.Raise, ast.JoinedStr)):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            yield node, name, i if isinstance(value, list) else None, child
            raises = isinstance(child, ast.If) and isinstance(child.body[-1], ast.Raise)
            yield from () if raises else sites(child)


def put(parent, name, i, child):
    if i is None:
        setattr(parent, name, child)
    else:
        getattr(parent, name)[i] = child


def mutants(tree, function):
    """Of a function in a module: what each bug is, and the text of the module with it."""
    for parent, name, i, child in list(sites(function)):
        for new in variants(child):
            put(parent, name, i, new)
            text = ast.unparse(tree)
            put(parent, name, i, child)
            shown = (child.test, new.test) if isinstance(child, ast.If) else (child, new)
            old, new = (" ".join(ast.unparse(each).split()) for each in shown)
            around = "" if isinstance(parent, ast.FunctionDef) else ast.unparse(parent)
            around = " ".join(around.split())
            yield f"{old} -> {new}" + f"  in  {around}" * (len(old) < 12 and len(around) < 90), text


def spelled(name):
    """A dotted name without the underscores of private parts, which a move may add or drop."""
    return "." + ".".join(part.strip("_") or part for part in name.split("."))


def definitions():
    """The functions, methods and classes of the package: by dotted name, file, tree and node."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        tree = ast.parse(path.read_text())
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield f"{module}.{node.name}", path, tree, node
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef):
                    yield f"{module}.{node.name}.{method.name}", path, tree, method


def found(name, known):
    """The one definition of a name, or what a module has at its top."""
    wanted = spelled(name.removesuffix(".py").replace("/", "."))
    exact = [each for each in known if spelled(each[0]).endswith(wanted)]
    if len(exact) == 1:
        return exact
    inside = [each for each in known if spelled(each[0].rpartition(".")[0]).endswith(wanted)]
    if exact or not inside:
        sys.exit(f"{name!r} is the name of {len(exact)} definitions: {[each[0] for each in exact]}")
    return inside


def tests_by_definition(known):
    """The files of tests for each chosen definition, and for each module that has one."""
    files = {path.stem: str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    tests = {}
    for stems, names in CHOSEN.items():
        for name in names.split():
            for definition, path, _, _ in found(name, known):
                for key in (definition, path):
                    paths = [files[stem] for stem in stems.split()]
                    tests[key] = list(dict.fromkeys(tests.get(key, []) + paths))
    return tests


def tests_of_room(path):
    """The tests in the folder that has the name of a file's room; none means all."""
    room = path.relative_to(ROOT / PACKAGE).parts[0].strip("_")
    return [f"tests/{room}"] if (ROOT / "tests" / room).is_dir() else []


def run_tests(folder, tests):
    """The exit status of some tests in a copy of the project, and the first failure."""
    command = [sys.executable, "-m", "pytest", "-xqn0", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end within {TIMEOUT} s"
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    failures = failures or [done.stdout[-300:] + done.stderr[-300:]]
    return done.returncode, failures[0].partition(" - ")[0]


def copied(folder):
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "dist"))
    return folder


def plant(path, text, tests):
    with tempfile.TemporaryDirectory() as temporary:
        folder = copied(pathlib.Path(temporary) / "copy")
        (folder / path.relative_to(ROOT)).write_text(text)
        return run_tests(folder, tests)


def main(args):
    known = list(definitions())
    tests = tests_by_definition(known)
    names = args.names or [name for names in CHOSEN.values() for name in names.split()]
    bugs = []
    for definition, path, tree, node in (each for name in names for each in found(name, known)):
        for what, text in mutants(tree, node):
            if (definition.rpartition(".")[2], what) not in EQUIVALENT:
                which = tests.get(definition) or tests.get(path) or tests_of_room(path)
                bugs.append(
                    (f"{definition.removeprefix(PACKAGE + '.')}: {what}", path, text, which)
                )
    if args.list:
        print(*(bug[0] for bug in bugs), f"{len(bugs)} bugs", sep="\n")
        return
    caught = 0
    with (
        tempfile.TemporaryDirectory() as cache,
        concurrent.futures.ThreadPoolExecutor(args.jobs) as pool,
    ):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache  # most programs are the same for all
        with tempfile.TemporaryDirectory() as temporary:
            every = list(dict.fromkeys(test for bug in bugs for test in bug[3]))
            status, failure = run_tests(copied(pathlib.Path(temporary) / "copy"), every)
        if status:
            sys.exit(f"The tests are red before anything is planted: {failure}")
        for (name, *_), (status, failure) in zip(
            bugs, pool.map(lambda bug: plant(*bug[1:]), bugs), strict=True
        ):
            caught += status == 1
            print(f"{'caught' if status == 1 else 'MISSED'}  {name}\n        {failure}", flush=True)
    print(f"{caught} of {len(bugs)} planted bugs were caught")
    sys.exit(caught != len(bugs))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="modules, functions and classes; else `CHOSEN`")
    parser.add_argument("--list", action="store_true", help="say which bugs there are")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at once")
    main(parser.parse_args())

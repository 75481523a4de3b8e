"""What a compiled program holds: kernels, bytes, all-reduces."""

import collections
import re

# These move nothing: names for buffers, and instructions whose work is another's.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "domain"),
    *("opt-barrier", "optimization-barrier", "add-dependency", "partition-id", "replica-id"),
    *("get-dimension-size",),
}
CALLED = re.compile(
    r"(to_apply|calls|body|condition|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)


def computations(text):
    """Returns the instructions of each computation, as (opcode, rest of the line); entry first."""
    found, entry, lines = {}, None, None
    for line in text.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY ").split(" ")[0].split("(")[0].lstrip("%")
            lines = found[name] = []
            entry = name if line.startswith("ENTRY ") else entry
        elif lines is not None and " = " in line:
            lines.append(_instruction(line.split(" = ", 1)[1]))
    return {entry: found.pop(entry)} | found


def _instruction(text):
    """Splits ``type opcode(operands), attributes``; a type may be a tuple of types."""
    if text.startswith("("):
        depth = 0
        for i, letter in enumerate(text):
            depth += (letter == "(") - (letter == ")")
            if depth == 0:
                break
        text = text[i + 1 :]
    else:
        text = text.split(" ", 1)[1]
    opcode, rest = text.lstrip().split("(", 1)
    return opcode, rest


def kernels(text):
    """Returns how many kernels of each kind one step launches, as a ``Counter``.

    A kernel is an instruction of the entry computation that does work of its own: a fusion, a
    copy, a reduction, a call of a library. Of a conditional the larger branch counts, of a loop
    one turn. Instructions in a computation that is merely called count as if they stood there.
    """
    found = computations(text)

    def count(name):
        total = collections.Counter()
        for opcode, rest in found[name]:
            names = {kind: re.findall(r"[\w.\-]+", value) for kind, value in CALLED.findall(rest)}
            if opcode == "conditional":
                branches = [count(branch) for called in names.values() for branch in called]
                total += max(branches, key=lambda branch: branch.total())
            elif opcode in ("call", "while", "async-start"):
                for branch in sum(names.values(), []):
                    total += count(branch)
            elif opcode not in FREE and not opcode.endswith(("-done", "-update")):
                total[opcode.removesuffix("-start")] += 1
        return total

    return count(next(iter(found)))


def program(compiled, parameters):
    """Returns what a compiled program moves and launches, as JSON types."""
    costs = compiled.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    kinds = kernels(text)
    all_reduces = len(re.findall(r"\ball-reduce(?:-start)?\(", text))
    return {
        "bytes_per_parameter": costs["bytes accessed"] / parameters,
        "temporary_bytes_per_parameter": memory.temp_size_in_bytes / parameters,
        "kernels": kinds.total(),
        "kernels_by_kind": dict(kinds.most_common()),
        "all_reduces": all_reduces,
    }

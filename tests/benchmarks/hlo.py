"""Contents of a compiled program: kernels, and the bytes that they move.

Counted in the program's text, in the same way for each machine and method. XLA's own figure for
bytes is reported beside ours; programs for a GPU that is not there have none.
"""

import collections
import math
import re
from typing import NamedTuple

# These move nothing: they name buffers, or their work is in the computations that they call.
FREE = {
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "domain",
    ),
    *(
        "opt-barrier",
        "add-dependency",
        "partition-id",
        "replica-id",
        "get-dimension-size",
    ),
    *("AllocateBuffer", "ConcatBitcast"),
    *("copy-start", "slice-start"),  # counted where they are done
}
# From one memory to another in the background, while kernels run: launched by no one.
TRANSFERS = {"copy-done", "slice-done"}
CALLS = {"call", "while", "async-start"}
INSTRUCTION = re.compile(
    r"  (?:ROOT )?%?(?P<name>\S+) = (?P<type>.*?) (?P<opcode>[a-z][\w\-]*)"
    r"\((?P<operands>.*?)\)(?P<attributes>|, [\w\-]+=.*)"
)
CALLED = re.compile(
    r"(?:to_apply|calls|body|condition|(?:branch|called)_computations|\w+_computation)="
    r"(\{[^}]*\}|%[\w.\-]+)"
)
ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\](\{[^}]*\})?")


class Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    operands: list[str]
    called: list[str]  # names of computations


def computations(text):
    """Returns the instructions of each computation by name, those of the entry first."""
    computations = {}
    entry = None
    for line in text.splitlines():
        if line.endswith("{") and line.startswith(("%", "ENTRY ")):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            instructions = computations[name] = []
            if line.startswith("ENTRY "):
                entry = name
        elif computations and line.startswith("  ") and " = " in line:
            instructions.append(_read_instruction(line))
    return {entry: computations.pop(entry)} | computations


def _read_instruction(line):
    parts = INSTRUCTION.fullmatch(line).groupdict()
    attributes = parts.pop("attributes")
    called = re.findall(r"[\w.\-]+", " ".join(CALLED.findall(attributes)))
    target = re.search(r'custom_call_target="(\w+)"', attributes)
    if target and target.group(1) in FREE:
        parts["opcode"] = target.group(1)
    parts["operands"] = re.findall(r"%([\w.\-]+)", parts["operands"])
    return Instruction(**parts, called=called)


def _bytes(type_, anywhere=False):
    """The bytes of an array, or of a tuple of arrays, that are in the device's main memory.

    Layouts of a TPU's arrays that are elsewhere, as on the chip, end in ``S(1)`` and so on.
    """
    total = 0
    for dtype, shape, layout in ARRAY.findall(type_):
        if re.search(r"S\([1-9]\d*\)", layout) and not anywhere:
            continue
        itemsize = 1
        if dtype != "pred":
            itemsize = int(re.search(r"\d+", dtype).group()) / 8
        dimensions = filter(None, shape.split(","))
        total += itemsize * math.prod(map(int, dimensions))
    return total


class Cost(NamedTuple):
    """Kernels by kind, and the bytes of main memory that are read and written."""

    kernels: collections.Counter
    bytes: float


def cost(text):
    """Returns the :class:`Cost` of one run of a program.

    A kernel is an instruction that does work of its own: a fusion, a copy, a reduction, a call
    of a library. It reads its operands, or the slices of them that it takes, and writes its
    result. Of a conditional the larger branch counts, of a loop one turn; what stands in a
    computation that is merely called counts as if it stood where it is called.
    """
    program = computations(text)

    def count(name):
        known = {instruction.name: instruction for instruction in program[name]}
        kernels = collections.Counter()
        moved = 0.0
        for instruction in program[name]:
            parts = []
            if instruction.opcode == "conditional":
                branches = [count(branch) for branch in instruction.called]
                parts = [max(branches, key=lambda branch: branch.kernels.total())]
            elif instruction.opcode in CALLS:
                parts = [count(called) for called in instruction.called]
            elif instruction.opcode in TRANSFERS:
                source, *_ = known[instruction.operands[0]].operands
                if _bytes(known[source].type):
                    moved += _bytes(instruction.type, anywhere=True)
                moved += _bytes(instruction.type)
            elif _is_kernel(instruction):
                kernels[instruction.opcode.removesuffix("-start")] += 1
                moved += _bytes(instruction.type) + bytes_read(instruction, known)
            for part in parts:
                kernels += part.kernels
                moved += part.bytes
        return Cost(kernels, moved)

    def bytes_read(instruction, known):
        sizes = {name: _bytes(known[name].type) for name in instruction.operands}
        if instruction.opcode == "fusion":
            body = program[instruction.called[0]]
            parameters = [part.name for part in body if part.opcode == "parameter"]
            for operand, parameter in zip(
                instruction.operands, parameters, strict=False
            ):
                readers = [part for part in body if parameter in part.operands]
                opcodes = {reader.opcode for reader in readers}
                if opcodes and opcodes <= {"slice", "dynamic-slice"}:
                    sliced = sum(_bytes(reader.type) for reader in readers)
                    sizes[operand] = min(sizes[operand], sliced)
        return sum(sizes.values())

    return count(next(iter(program)))


def _is_kernel(instruction):
    opcode = instruction.opcode
    return opcode not in FREE and not opcode.endswith("-done")


def program(compiled, parameters):
    """Returns what a compiled program moves, keeps and launches, as JSON types."""
    kernels, moved = cost(compiled.as_text())
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return {
        "bytes_per_parameter": moved / parameters,
        "temporary_bytes_per_parameter": temporary / parameters,
        "kernels": kernels.total(),
    }

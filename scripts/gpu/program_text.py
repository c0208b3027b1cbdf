"""Reads what compiling leaves behind: the assembler's lines about kernels, and optimised HLO."""

import dataclasses
import math
import re
from typing import NamedTuple

LARGE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What the assembler said about one Mosaic kernel."""

    name: str
    registers: int
    spilled_bytes: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    wgmma: int
    """Matrix instructions in the program text."""
    tma: int
    """Bulk asynchronous copies in the program text."""


def parse_assembler(text: str) -> list[KernelReport]:
    """Kernels in what Mosaic prints: their PTX, then the assembler's lines about each."""
    programs = {}
    for match in re.finditer(r"\.visible \.entry (\S+?)\(.*?\n}", text, re.DOTALL):
        programs[match[1]] = match[0]
    about = re.compile(
        r"Compiling entry function '(?P<name>[^']+)'"
        r".*?(?P<stack>\d+) bytes stack frame, (?P<out>\d+) bytes spill stores, "
        r"(?P<back>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.DOTALL,
    )
    kernels = []
    for match in about.finditer(text):
        program = programs.get(match["name"], "")
        threads = re.search(r"\.maxntid (\d+)", program)
        static = re.search(r"(\d+) bytes smem", match["rest"])
        kernels.append(
            KernelReport(
                name=match["name"].removesuffix("_mosaic_gpu_kernel"),
                registers=int(match["registers"]),
                spilled_bytes=int(match["out"]) + int(match["back"]),
                stack_bytes=int(match["stack"]),
                shared_bytes=int(static[1]) if static else 0,
                threads=int(threads[1]) if threads else 0,
                wgmma=program.count("wgmma.mma_async"),
                tma=program.count("cp.async.bulk.tensor"),
            )
        )
    return kernels


@dataclasses.dataclass(frozen=True)
class Move:
    """An operation that only copies or rewrites an array of more than 1 MiB."""

    kind: str
    """"copy", "convert" or "transpose"."""
    array: str
    """Its result, such as "bf16[16,7168]"."""


def large_moves(hlo: str) -> list[Move]:
    """What an optimised program moves through memory for the sake of place or form alone.

    That is a copy, conversion or transposition of more than 1 MiB that stands by itself, or makes
    up a fusion with nothing but others of its kind; the layout of a fusion's work is no move.
    """
    computations = _computations(hlo)
    fused = set(re.findall(r"calls=%?([\w.-]+)", hlo))
    moves = []
    for name, instructions in computations.items():
        if name in fused:
            continue
        for instruction in instructions:
            kind = instruction.op
            if kind in ("fusion", "fusion-start"):
                kind = _moving_kind(computations.get(instruction.calls, []))
            elif kind == "copy-start":
                kind = "copy"
            if kind in _MOVES and instruction.nbytes > LARGE_BYTES:
                moves.append(Move(kind, instruction.array))
    return moves


class _Instruction(NamedTuple):
    op: str
    array: str
    nbytes: int
    calls: str


_MOVES = ("copy", "convert", "transpose")
_FREE = ("parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element", "slice")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.-]+ = \(*(?P<array>(?P<dtype>\w+)\[(?P<dims>[\d,]*)\]).*?"
    r"(?<=[\s)])(?P<op>[a-z][\w-]*)\((?P<rest>.*)$"
)
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) (?:\(.*\) -> .* )?\{$")


def _computations(hlo: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] = []
    for line in hlo.splitlines():
        header = _HEADER.match(line)
        if header:
            current = found.setdefault(header[1], [])
            continue
        match = _INSTRUCTION.match(line)
        if match:
            calls = re.search(r"calls=%?([\w.-]+)", match["rest"])
            size = _nbytes(match["dtype"], match["dims"])
            current.append(
                _Instruction(match["op"], match["array"], size, calls[1] if calls else "")
            )
    return found


def _moving_kind(instructions: list[_Instruction]) -> str:
    """The kind of move that a fusion of nothing else makes, or "" if it does anything else."""
    ops = [i.op for i in instructions if i.op not in _FREE]
    if not ops or any(op not in _MOVES for op in ops):
        return ""
    return min(ops, key=_MOVES[::-1].index)


def _nbytes(dtype: str, dims: str) -> int:
    bits = re.search(r"\d+", dtype)
    count = math.prod(int(n) for n in dims.split(",") if n)
    return count * (int(bits[0]) if bits else 8) // 8

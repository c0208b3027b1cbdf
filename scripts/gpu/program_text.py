"""Reads what compiling leaves behind: the assembler's lines about kernels, and optimised HLO."""

import dataclasses
import math
import re

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


def large_moves(hlo: str) -> tuple[list[str], int]:
    """Copies of more than 1 MiB, and how many conversions and transpositions, in optimised HLO."""
    copies, rewrites = [], 0
    for match in re.finditer(r"= (\w+)\[([\d,]*)\]\S* (copy|convert|transpose)\(", hlo):
        kind, dims, op = match.groups()
        bits = re.search(r"\d+", kind)
        size = math.prod(int(n) for n in dims.split(",") if n) * (int(bits[0]) if bits else 8) // 8
        if size <= LARGE_BYTES:
            continue
        if op == "copy":
            copies.append(f"{kind}[{dims}]")
        else:
            rewrites += 1
    return copies, rewrites

"""Registers, spills and copies are read out of what the compilers print."""

import pytest

from scripts.gpu.program_text import KernelReport, Move, large_moves, parse_assembler

PRINTED = """
.visible .entry some_step_mosaic_gpu_kernel(
    .param .u64 first
)
.maxntid 256, 1, 1
{
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {};
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {};
    cp.async.bulk.tensor.2d.shared::cluster.global.tile [a], [b];
    cp.async.bulk.commit_group;
}
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'some_step_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for some_step_mosaic_gpu_kernel
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 540 bytes cmem[0]
"""


def test_a_kernels_resources_are_read_from_what_the_assembler_prints():
    assert parse_assembler("noise\n" + PRINTED) == [
        KernelReport(
            name="some_step",
            registers=168,
            spilled_bytes=12,
            stack_bytes=16,
            shared_bytes=1024,
            threads=256,
            wgmma=2,
            tma=1,
        )
    ]


@pytest.mark.parametrize(
    ("line", "move"),
    [
        ("%copy.1 = f32[512,513]{1,0} copy(%a)", Move("copy", "f32[512,513]")),
        ("%copy.1 = f32[512,512]{1,0} copy(%a)", None),
        ("ROOT %c = bf16[1024,1024]{0,1:T(8)} convert(%a)", Move("convert", "bf16[1024,1024]")),
        (
            "%t = u8[2097152]{0} transpose(%a), dimensions={0}",
            Move("transpose", "u8[2097152]"),
        ),
        (
            "%s = (f32[999,999]{1,0}, f32[999,999]{1,0}, u32[]) copy-start(%a)",
            Move("copy", "f32[999,999]"),
        ),
        ("%d = f32[4096,4096]{1,0} dot(%copy.1, %convert.2), dims={}", None),
    ],
)
def test_only_large_moves_count(line, move):
    assert large_moves(f"ENTRY %main (a: f32[9]) -> f32[9] {{\n  {line}\n}}") == (
        [] if move is None else [move]
    )


FUSION = """
%inner (p: s8[4096,4096]) -> f32[4096,4096] {
  %p = s8[4096,4096]{1,0} parameter(0)
  %converted = f32[4096,4096]{1,0} convert(%p)
  BODY
}

ENTRY %main (x: s8[4096,4096]) -> f32[4096,4096] {
  %x = s8[4096,4096]{1,0} parameter(0)
  ROOT %out = f32[4096,4096]{1,0} fusion(%x), kind=kLoop, calls=%inner
}
"""


@pytest.mark.parametrize(
    ("body", "moves"),
    [
        ("ROOT %b = f32[4096,4096]{1,0} bitcast(%converted)", ["convert"]),
        ("ROOT %t = f32[4096,4096]{0,1} transpose(%converted)", ["transpose"]),
        ("ROOT %s = f32[4096,4096]{1,0} multiply(%converted, %converted)", []),
    ],
)
def test_a_fusion_moves_only_if_it_does_nothing_else(body, moves):
    assert [move.kind for move in large_moves(FUSION.replace("BODY", body))] == moves

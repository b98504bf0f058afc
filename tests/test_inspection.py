# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Reading what kernels were compiled to: ptxas's words, machine code, facts in the file; and what is recorded of it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from build_stubs import REAL_COMPILER, script

from mla_kernels import build, inspection, toolchain

REPOSITORY = Path(__file__).resolve().parents[1]
CUTLASS = (
    "_ZN7cutlass13device_kernelINS_4fmha6kernel36Sm100FmhaMlaKernelTmaWarpspecializedIN4cute5tupleIJNS4_1CILi128EEES7_"
    "NS5_IJNS6_ILi512EEENS6_ILi64EEEEEEEEE{element}EfNS_10bfloat16_tEfNS2_31Sm100Mla{scheduler}TileSchedulerELb0EEEEEvNT_"
    "6ParamsE"
)
SYMBOLS = {
    CUTLASS.format(element="NS_12float_e4m3_t", scheduler="Individual"): "mla e4m3, individual",
    CUTLASS.format(element="NS_10bfloat16_t", scheduler="Persistent"): "mla bf16, persistent",
    CUTLASS.format(element="NS_6half_t", scheduler="Persistent"): "mla fp16, persistent",
    "_ZN3mla6sm90a13decode_kernelINS0_6TraitsILi16ELb1EEEEEvNS0_12KernelParamsE": "decode e4m3, 16 lines, TMA",
    "_ZN3mla5sm90a13decode_kernelINS0_6TraitsILi64ELb0EEEEEvNS0_12KernelParamsE": "decode e4m3, 64 lines, gather",
    "_ZN3mla5sm90a6bits1615decode16_kernelINS1_6TraitsI6__halfLb1EEEEEvNS0_12KernelParamsE": "decode fp16, TMA",
    "_ZN3mla5sm90a6bits1615decode16_kernelINS1_6TraitsI13__nv_bfloat16Lb0EEEEEvNS_6ParamsE": "decode bf16, gather",
    "_ZN3mla6sm100a39_GLOBAL__N__c68f72e7_7_rows_cu_05e8e32913finish_kernelI6__halfEEvNS0_10KernelCallE": "finish fp16",
    "_ZN3mla6sm100a13finish_kernelI13__nv_bfloat16EEvNS0_10KernelCallE": "finish bf16",
    "_ZN3mla6sm100aL14prepare_kernelENS0_10KernelCallE": "prepare",
    "_Z9somethingv": "_Z9somethingv",
}
LOG = """\
[1/3] /usr/bin/c++ -O3 -c /x/csrc/cpu/launch.cpp
[2/3] /usr/local/bin/nvcc -O3 -x cu -c /x/csrc/sm100a/mla_e4m3_individual.cu -o mla.cu.o
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '{e4m3}' for 'sm_100a'
ptxas info    : Function properties for {e4m3}
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 255 registers, used 15 barriers
ptxas info    : Compile time = 2126.000 ms
[3/3] /usr/local/bin/nvcc -O3 -x cu -c /x/csrc/sm100a/rows.cu -o rows.cu.o
ptxas info    : Compiling entry function '_ZN3mla6sm100aL14prepare_kernelENS0_10KernelCallE' for 'sm_100a'
ptxas info    : Function properties for _ZN3mla6sm100aL14prepare_kernelENS0_10KernelCallE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 512 bytes smem
"""
SASS = """\
Fatbin elf code:
================
arch = sm_100a
code version = [1,8]

\t\tFunction : {e4m3}
\t.headerflags\t@"EF_CUDA_SM100"
        /*0000*/                   LDC R1, c[0x0][0x37c] ;                       /* 0x0000df00ff017b82 */
                                                                                 /* 0x000fe20000000800 */
        /*0010*/             @!UP1 UTCQMMA.2CTA gdesc[UR24], gdesc[UR26], tmem[UR4] ; /* 0x0 */
        /*0020*/                   UTCQMMA.2CTA gdesc[UR24], gdesc[UR26] ;       /* 0x0 */
        /*0030*/                   UTMALDG.4D.2CTA [UR8], [UR4], desc[UR14] ;    /* 0x0 */
        /*0040*/               @P0 STL [R1+0x84], R5 ;                           /* 0x0 */
        /*0050*/                   MUFU.EX2 R3, R3 ;                             /* 0x0 */
        /*0060*/                   BPT.TRAP 0x1 ;                                /* 0x0 */
        /*10070*/                  LDTM.x32 R4, tmem[UR4] ;                      /* 0x0 */
"""


def built(tmp_path: Path, log: str, source: str = "int nothing;\n") -> build.Built:
    (tmp_path / "log").write_text(log)
    (tmp_path / "library.cpp").write_text(source)
    library = tmp_path / "library.so"
    include = REPOSITORY / "csrc/include"
    command = [REAL_COMPILER, "-std=c++17", "-shared", "-fPIC", f"-I{include}", "-o", library, tmp_path / "library.cpp"]
    subprocess.run(command, check=True)
    return build.Built(
        library, "key", ("cpu", "sm100a"), tmp_path / "log", 1.0, True, {"file_seconds": {"sm100a/rows.cu": 2.5}}
    )


def log(stack: int = 0, stores: int = 0, loads: int = 0) -> str:
    return LOG.format(e4m3=next(iter(SYMBOLS)), stack=stack, stores=stores, loads=loads)


@pytest.mark.parametrize(("symbol", "name"), SYMBOLS.items())
def test_names_of_kernels(symbol: str, name: str) -> None:
    assert inspection.kernel_name(symbol) == name


def test_log_facts_and_machine_code_make_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fact = '#include "mla/facts.h"\nMLA_FACT(fact, "mla e4m3, individual", sizeof(char[230000]));\n'
    sass = SASS.format(e4m3=next(iter(SYMBOLS)))
    stub = script(tmp_path / "bin/cuobjdump", f"cat <<'END'\n{sass}END\n")
    monkeypatch.setattr(toolchain, "cuobjdumps", lambda environ=None: [str(stub)])
    table = inspection.compiled_kernels(built(tmp_path, log(144, 140, 152), fact))
    assert table["kernel"].tolist() == ["mla e4m3, individual", "prepare"]
    assert table["compile_seconds"].isna().tolist() == [True, False]
    first = {**table.iloc[0].to_dict(), "compile_seconds": None}
    told = {"kernel": "mla e4m3, individual", "file": "sm100a/mla_e4m3_individual.cu", "compile_seconds": None}
    sizes = {"registers": 255, "shared_bytes": 230000, "spill_bytes": 292}
    counts = dict.fromkeys(inspection.INSTRUCTIONS, 1) | {"fp8_mma": 2, "bf16_fp16_mma": 0, "tma_prefetches": 0}
    assert first == {"target": "sm100a", **told, **sizes, **counts, "instructions": 8}
    second = table.iloc[1]
    assert (second["registers"], second["shared_bytes"], second["spill_bytes"]) == (24, 512, 0)
    assert pd.isna(second["fp8_mma"])  # not in the machine code that the stub shows


def test_without_cuobjdump_instructions_are_missing_and_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = script(tmp_path / "bin/cuobjdump", "echo no; exit 1\n")
    monkeypatch.setattr(toolchain, "cuobjdumps", lambda environ=None: [str(broken)])
    table, origin = inspection.kernels_here_or_recorded(built(tmp_path, log()))
    assert "fp8_mma" not in table
    assert table["registers"].tolist() == [255, 24]
    assert origin == f"compiled here; instructions are not counted: {inspection.NO_CUOBJDUMP}"
    assert inspection.NO_CUOBJDUMP == "no cuobjdump: python -m pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"


def test_build_without_gpu_code_shows_what_is_recorded(tmp_path: Path) -> None:
    table, origin = inspection.kernels_here_or_recorded(built(tmp_path, "nothing of ptxas\n"))
    content = json.loads((REPOSITORY / "data/measurements/compiled/kernels.json").read_text())
    assert origin.startswith("recorded, compiled and not run: ")
    assert content["provenance"]["date"] in origin
    assert len(table) == len(content["rows"])


def test_recorded_kernels() -> None:
    """All instantiations of sm100a, none with spills; each kernel has the tensor-core instructions of its format."""
    content = json.loads((REPOSITORY / "data/measurements/compiled/kernels.json").read_text())
    table = pd.DataFrame(content["rows"])
    assert {"date", "commit", "command", "nvcc", "cutlass", "note"} <= content["provenance"].keys()
    assert ((table["spill_bytes"] == 0) == (table["spill_moves"] == 0)).all()  # ptxas and the machine code agree
    assert (table.loc[table["target"] == "sm100a", "spill_bytes"] == 0).all()
    assert table["registers"].between(1, 255).all()
    mla = table[table["kernel"].str.startswith("mla ")]
    assert set(mla["kernel"]) == {
        f"mla {t}, {s}" for t in ("e4m3", "bf16", "fp16") for s in ("individual", "persistent")
    }
    assert (mla["shared_bytes"] <= 232448).all()
    for kernels in (mla, table[table["kernel"].str.startswith("decode ")]):
        fp8 = kernels["kernel"].str.contains("e4m3")
        assert fp8.any()
        assert (kernels.loc[fp8, "fp8_mma"] > 0).all()
        assert (kernels.loc[~fp8, "fp8_mma"] == 0).all()
        assert (kernels.loc[~fp8, "bf16_fp16_mma"] > 0).all()


def test_seconds_of_each_file(tmp_path: Path) -> None:
    log = tmp_path / ".ninja_log"
    log.write_text(
        "# ninja log v5\n10\t1510\t1\tsm100a/CMakeFiles/mla_sm100a.dir/launch.cu.o\tabc\n1\t2\t3\tlib.so\td\n"
    )
    assert build._file_seconds(log) == {"sm100a/launch.cu": 1.5}
    assert build._file_seconds(tmp_path / "none") == {}


def kernels(**changes: object) -> pd.DataFrame:
    rows = [
        {"target": "sm100a", "kernel": "mla e4m3, individual", "registers": 255, "fp8_mma": 52, "bf16_fp16_mma": 0},
        {"target": "sm100a", "kernel": "mla bf16, individual", "registers": 254, "fp8_mma": 0, "bf16_fp16_mma": 48},
        {"target": "sm100a", "kernel": "prepare", "registers": 24, "fp8_mma": 0, "bf16_fp16_mma": 0},
        {"target": "sm90a", "kernel": "decode e4m3, 64 lines, TMA", "registers": 128, "fp8_mma": 9, "bf16_fp16_mma": 0},
    ]
    rows[0] |= changes
    return pd.DataFrame(rows)


def test_side_by_side() -> None:
    table = inspection.side_by_side(kernels()).set_index("what")
    assert list(table.columns) == ["sm90a", "sm100a"]
    assert table.loc["registers"].tolist() == [128, 255]
    assert table.loc["kernel", "sm100a"] == "mla e4m3, individual"


def test_format_of_the_tensor_core_instructions() -> None:
    assert inspection.wrong_formats(kernels()) == []
    for change in ({"fp8_mma": 0}, {"bf16_fp16_mma": 3}, {"fp8_mma": 0, "bf16_fp16_mma": 48}):
        assert inspection.wrong_formats(kernels(**change)) == ["sm100a mla e4m3, individual"]
    assert inspection.wrong_formats(kernels().drop(columns="fp8_mma")) == []

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Loading: several builds in one process, the self-test and what it catches, and the real library of csrc/.

Libraries stay in the process that loaded them, so all but the last tests load in child processes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from build_stubs import ODD, Site, child, finish, write_torch_tree

from mla_kernels import _selftest, build, toolchain

LOAD = """
    from pathlib import Path
    import torch
    sys.path.insert(0, sys.argv[4])
    from build_stubs import set_value
    from mla_kernels import toolchain
    tree, options = Path(sys.argv[1]), dict(source_dir=sys.argv[1], cache_dir=sys.argv[2], compiler=sys.argv[3])
    ops = torch.ops.mla_kernels
    real_self_test = build._self_test
    def refused(function, *arguments, **keywords):
        try:
            function(*arguments, **keywords)
        except build.BuildError as error:
            return str(error)
        raise AssertionError("was not refused")
"""


def run(site: Site, code: str, **environment: str) -> str:
    """Run `code` in a child; its error output."""
    program = textwrap.dedent(LOAD) + textwrap.dedent(code)
    arguments = (site.tree, site.cache, site.compiler, Path(__file__).parent)
    return finish(child(program, *arguments, **environment))[1]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    write_torch_tree(site.tree)
    return site


def test_rebuilt_library_answers_in_the_same_process(site: Site) -> None:
    with open(site.tree / "cpu/probe.cpp", "a") as source:
        source.write('#include <unistd.h>\nstatic auto said = write(2, "from a constructor\\n", 19);\n')
    err = run(
        site,
        """
        runs = []
        build._self_test = lambda targets: runs.append(targets) or []
        assert build.loaded() is None
        first = build.load(**options)
        assert (ops.cpu_isa(), ops.build_key(), build.loaded()) == ("1 1", first.key, first)
        assert build.load(**options).path == build.load(first).path == first.path
        assert runs == [("cpu",)]                                      # once a process and build
        set_value(tree, 2)                                             # a constant in an included header
        second = build.load(**options)
        assert second.rebuilt and second.key != first.key
        assert (ops.cpu_isa(), ops.build_key(), build.loaded()) == ("2 2", second.key, second)
        assert build.load(first) == first                              # back, and forth
        assert (ops.cpu_isa(), ops.build_key()) == ("1 1", first.key)
        build.load(second)
        assert (ops.cpu_isa(), ops.build_key()) == ("2 2", second.key)
        assert len(runs) == 4
        assert not list(first.path.parent.glob(".again-*")) + list(second.path.parent.glob(".again-*"))
        assert first.info["self_test_seconds"] < 5
        """,
    )
    assert "Warning" not in err
    assert "Overriding" not in err
    assert err.count("from a constructor") == 4  # what else is written while loading is kept
    assert len(err.splitlines()) == 8


@pytest.mark.parametrize("can_be_unloaded", [True, False])
def test_library_that_fails_its_self_test_is_not_used(site: Site, can_be_unloaded: bool) -> None:
    """A unique symbol keeps a library in the process. Then the build from before must be loaded over it once more."""
    if not can_be_unloaded:
        with open(site.tree / "cpu/probe.cpp", "a") as source:
            source.write(
                '__attribute__((visibility("default"))) inline int unique = 1;\nint* user() { return &unique; }\n'
            )
    run(
        site,
        f"can_be_unloaded = {can_be_unloaded}\n"
        + textwrap.dedent("""
        message = refused(build.load, **options)                       # its decode writes nothing
        assert "fails its self-test and is not used" in message, message
        assert "cpu, bf16: row of 70 tokens: 1539 outputs are NaN" in message, message
        assert build.loaded() is None
        assert ("restart this process" in message) is not can_be_unloaded, message
        answers = torch._C._dispatch_has_kernel_for_dispatch_key("mla_kernels::mla_decode_out", "CPU")
        assert answers is not can_be_unloaded
        build._self_test = lambda targets: []
        good = build.load(**options)
        build._self_test = real_self_test
        set_value(tree, 2)
        for _ in range(2):
            assert "fails its self-test" in refused(build.load, **options)
            assert (ops.cpu_isa(), build.loaded()) == ("1 1", good)    # the one from before answers
        build._self_test = lambda targets: 1 / 0                       # so it does after a self-test that raises
        assert "ZeroDivisionError" in refused(build.load, **options)
        assert (ops.cpu_isa(), build.loaded()) == ("1 1", good)
        assert not list(Path(sys.argv[2]).glob("*/.again-*"))
        """),
    )


def test_library_with_another_key_or_a_missing_symbol(site: Site) -> None:
    run(
        site,
        """
        source = tree / "cpu/probe.cpp"
        text = source.read_text()
        source.write_text(text.replace("KEY, sizeof(KEY) - 1", '"else", 4'))
        assert "it answers with key else" in refused(build.load, **options)
        source.write_text(text + "extern int nowhere(); int somewhere() { return nowhere(); } int all_ = somewhere();")
        message = refused(build.load, **options)
        assert "cannot be loaded: " in message and "undefined symbol" in message, message
        assert build.loaded() is None
        """,
    )


def test_torch_and_cache_under_odd_paths(site: Site, tmp_path: Path) -> None:
    odd = tmp_path / ODD
    odd.mkdir()
    (odd / "torch").symlink_to(toolchain.torch_facts().folder)
    site.cache = odd / "cache"
    run(
        site,
        """
        facts = toolchain.torch_facts()
        odd = os.path.dirname(sys.argv[2])
        toolchain.torch_facts = lambda: toolchain.TorchFacts(odd + "/torch", facts.version, None, facts.revision)
        build._self_test = lambda targets: []
        assert build.load(**options).path.is_relative_to(odd)
        assert ops.cpu_isa() == "1 1"
        """,
    )


# The self-test: operators in Python, each with one fault

FAULTS = {
    "right": "",
    "nothing is written": "return",
    "the last row is not written": "lens = lens[:-1]",
    "zeros are written": "out.zero_(); lse.zero_(); return",
    "one token too few": "lens = (lens - 1).clamp(min=0)",
    "one token too many": "lens = lens + 1",
    "pages in order of their ids": "table = table.sort(-1).values",
    "q_scale is dropped": "q_scale = 1.0",
    "kv_scale is dropped": "kv_scale = 1.0",
    "kv_scale missing in the output": "out_scale = 1.0",
    "sm_scale is dropped": "sm_scale = 1.0",
    "the rope part is dropped": "q_pe = q_pe.float() * 0",
    "the latent part is dropped": "q_nope = q_nope.float() * 0",
    "heads are swapped": "q_nope, q_pe = q_nope.flip(2), q_pe.flip(2)",
    "lse in base 2": "log = torch.log2",
    "an empty row is left as it was": "empty = None",
    "an empty row gives lse 0": "empty = 0.0",
    "the second tile is not rescaled": "rescale = False",
}
DECODE = """
import torch
from mla_kernels import _selftest, ops

def decode(fault, q_nope, q_pe, kv, lens, table, sm_scale, q_scale, kv_scale, out, lse):
    log, empty, rescale = torch.log, -torch.inf, True
    given = dict(locals(), out_scale=kv_scale)
    if fault.endswith("return"):
        exec(fault.removesuffix("return").rstrip("; "), globals(), given)
        return
    exec(fault, globals(), given)
    lens, table, log, empty = given["lens"], given["table"], given["log"], given["empty"]
    q = torch.cat([given["q_nope"].double(), given["q_pe"].double()], -1)
    for row, length in enumerate(lens.tolist()):
        if length == 0:
            if empty is not None:
                out[row], lse[row] = 0, empty
            continue
        keys = kv[table[row].long()].reshape(-1, 576)[:length].double()
        logits = q[row, 0] @ keys.T * given["sm_scale"] * given["q_scale"] * given["kv_scale"]
        top, total, sums = torch.full((len(logits), 1), -torch.inf).double(), 0, 0
        for tile in range(0, length, 64):
            part = logits[:, tile : tile + 64]
            new_top = torch.maximum(top, part.amax(-1, keepdim=True))
            alpha = torch.exp(top - new_top) if given["rescale"] or tile == 0 else 1
            weights = torch.exp(part - new_top)
            total = total * alpha + weights.sum(-1, keepdim=True)
            sums = sums * alpha + weights @ keys[tile : tile + 64, :512]
            top = new_top
        out[row, 0], lse[row, 0] = (sums / total * given["out_scale"]).to(out.dtype), (log(total) + top)[:, 0].float()

fault = ""
torch.set_num_threads(1)
def registered(a, b, c, d, e, sm_scale, q_scale, kv_scale, qt, kt, splits, out, lse, workspace=None):
    decode(fault, a, b, c, d, e, sm_scale, q_scale, kv_scale, out, lse)
library = torch.library.Library("mla_kernels", "IMPL")
library.impl("mla_decode_out", registered, "CPU")
answer = {}
for name, fault in json.loads(sys.argv[1]).items():
    answer[name] = _selftest.self_test(("cpu",), {})
print(json.dumps(answer))
"""


def test_self_test_finds_each_fault() -> None:
    found = json.loads(finish(child(DECODE, json.dumps(FAULTS)))[0])
    assert found.pop("right") == []
    assert [name for name, faults in found.items() if not faults] == []
    assert all(re.match(r"cpu, (bf16|e4m3): row of \d+ tokens: ", line) for faults in found.values() for line in faults)
    only_e4m3 = {name for name, faults in found.items() if all("e4m3" in line for line in faults)}
    assert only_e4m3 == {"q_scale is dropped", "kv_scale is dropped", "kv_scale missing in the output"}
    assert "3 outputs are NaN" not in str(found["nothing is written"])
    assert "1539 outputs are NaN" in found["nothing is written"][0]  # 3 heads x (512 + 1)


# The real library


def test_self_test_has_its_own_dtype_and_device(cpu_build: build.Built) -> None:
    build.load(cpu_build)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as an engine does while it makes a model
    try:
        with torch.device("meta"):
            assert _selftest.self_test(("cpu",), {}) == []
    finally:
        torch.set_default_dtype(before)


def test_real_library_is_loaded(cpu_build: build.Built) -> None:
    build.load(cpu_build)  # another test of this process may have loaded another build
    loaded = build.loaded()
    assert loaded is not None
    assert (loaded.key, loaded.path) == (cpu_build.key, cpu_build.path)
    assert torch.ops.mla_kernels.build_key() == cpu_build.key
    assert build._self_test(("cpu",)) == []
    assert not build.load().rebuilt


def test_real_library_needs_no_driver(cpu_build: build.Built) -> None:
    """It names torch's CPU library and the C++ runtime, and nothing of CUDA."""
    text = subprocess.run(["readelf", "-d", cpu_build.path], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(\S+?)\.so", text)
    assert "libtorch_cpu" in needed
    assert set(needed) <= {
        "libtorch_cpu",
        "libstdc++",
        "libm",
        "libgcc_s",
        "libc",
        "ld-linux-x86-64",
        "ld-linux-aarch64",
    }


def test_real_library_can_be_unloaded(cpu_build: build.Built) -> None:
    """A library that fails its self-test goes away again: nothing in it may keep it in the process."""
    _, err = finish(
        child(
            """
        import torch
        build._self_test = lambda targets: ["planted"]
        try:
            build.load()
        except build.BuildError as error:
            assert "planted" in str(error)
        maps = open("/proc/self/maps").read()
        assert "libmla_kernels" not in maps
        """
        )
    )
    assert "error" not in err.lower()


def test_command_line(cpu_build: build.Built, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mla_kernels.build"]
    good = subprocess.run([*command, "--target", "cpu"], capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    assert re.search(r"^cpu: build yes, load yes, run yes$", good.stdout, re.M)
    assert re.search(rf"^cpu: .*libmla_kernels-{cpu_build.key}.* passes its self-test; log: ", good.stdout, re.M)
    bad = subprocess.run([*command, "--compiler", str(tmp_path / "none")], capture_output=True, text=True)
    assert bad.returncode == 1
    assert "no C++ compiler" in bad.stderr
    assert "Traceback" not in bad.stderr

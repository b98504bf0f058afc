# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
"""Checks and times the Hopper kernel by itself (no operator).

    check.py LIBRARY correct | tiny | fast | bench PEERS [bxhxs,...] | cold PEERS bxhxs,... | profile b h s splits

LIBRARY comes from check/build.sh, PEERS is the folder of FlashMLA's libraries. References are float64 on the same e4m3
values: `exact`, and `stage`, which also rounds P to e4m3 against each line's base (the running maximum for bf16) as the
kernel does. Exits with 1 if a check fails.
"""

import ctypes
import itertools
import math
import os
import sys

import torch

i64, i32, f32, ptr = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_void_p
DEV = "cuda"
E4M3 = torch.float8_e4m3fn
P_SCALE, SLACK = 32, 3.75  # of config.h
WIDE = (("bf16", torch.bfloat16), ("fp16", torch.float16))


class Params(ctypes.Structure):
    """mla::DecodeParams."""

    _fields_ = [
        ("q_nope", ptr), ("q_pe", ptr), ("q_nope_stride", i64 * 3), ("q_pe_stride", i64 * 3),
        ("kv_cache", ptr), ("kv_page_stride", i64), ("kv_token_stride", i64), ("num_blocks", i64),
        ("page_size_log2", i32),
        ("seq_lens", ptr), ("seq_lens_stride", i64), ("block_table", ptr), ("block_table_stride", i64),
        ("max_blocks", i64),
        ("out", ptr), ("out_stride", i64 * 3), ("lse", ptr), ("lse_stride", i64 * 3),
        ("b", i32), ("s_q", i32), ("h_q", i32), ("dtype", i32), ("logit_scale", f32), ("out_scale", f32),
        ("num_kv_splits", i32),
    ]  # fmt: skip


def load_library(path):
    lib = ctypes.CDLL(path)
    lib.mla_check_params_size.restype = ctypes.c_size_t
    lib.mla_check_workspace.restype = ctypes.c_size_t
    lib.mla_check_workspace.argtypes = [ptr]
    lib.mla_check_plan_share.argtypes = [ctypes.c_longlong, i32, i32, i32, i32, i32, i32]
    lib.mla_check_launch.argtypes = [ptr, ptr, ptr, ptr, ptr, ctypes.c_char_p, ctypes.c_size_t]
    assert lib.mla_check_params_size() == ctypes.sizeof(Params), "params.h and check.py disagree"
    return lib


class Problem:
    def __init__(
        self,
        lens,
        h,
        s_q=1,
        page=64,
        mean=0.0,
        q_std=1.0,
        q_scale=1.0,
        kv_scale=1.0,
        splits=0,
        capacity=None,
        seed=0,
        spare=3,
        hostile=True,
        dtype=E4M3,
    ):
        g = torch.Generator(device=DEV).manual_seed(seed)
        self.lens, self.h, self.s_q, self.page, self.splits = list(lens), h, s_q, page, splits
        self.q_scale, self.kv_scale, self.sm_scale = q_scale, kv_scale, 576**-0.5
        self.b = b = len(lens)
        self.mean, self.dtype = mean, dtype
        self.out_dtype = torch.float16 if dtype == torch.float16 else torch.bfloat16
        cap = max(capacity or 0, max(lens), 1)
        self.max_blocks = (cap + page - 1) // page
        need = [(n + page - 1) // page for n in lens]
        total = sum(need)
        self.num_blocks = total + spare
        self.q = (torch.randn(b, s_q, h, 576, generator=g, device=DEV) * q_std / q_scale).clamp(-448, 448).to(dtype)
        bits = torch.uint8 if dtype == E4M3 else torch.int16
        kv = torch.empty(self.num_blocks, page, 576, dtype=bits, device=DEV)
        for i in range(0, self.num_blocks, 4096):
            n = min(4096, self.num_blocks - i)
            x = (torch.randn(n, page, 576, generator=g, device=DEV) + mean) / kv_scale
            kv[i : i + n] = x.clamp(-448, 448).to(dtype).view(bits)
        self.kv = kv
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(seed)).int()
        table = torch.full((b, self.max_blocks), 2**31 - 1 if hostile else 0, dtype=torch.int32)
        table[:, ::2] = -1 if hostile else 0
        at = 0
        for r, n in enumerate(need):
            table[r, :n] = order[at : at + n]
            if hostile and lens[r] % page and n:
                kv[int(order[at + n - 1]), lens[r] % page :] = 0x7F if dtype == E4M3 else 0x7FFF
            at += n
        if hostile:
            kv[order[at:].long().to(DEV)] = 0xFF if dtype == E4M3 else -1
        self.table = table.to(DEV)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=DEV)
        self.out = torch.full((b, s_q, h, 512), float("nan"), dtype=self.out_dtype, device=DEV)
        self.lse = torch.full((b, s_q, h), float("nan"), device=DEV)
        self.q_nope, self.q_pe = self.q[..., :512], self.q[..., 512:]

    def params(self):
        p = Params()
        p.q_nope, p.q_pe = self.q_nope.data_ptr(), self.q_pe.data_ptr()
        p.q_nope_stride[:] = self.q_nope.stride()[:3]
        p.q_pe_stride[:] = self.q_pe.stride()[:3]
        p.kv_cache, p.kv_page_stride, p.kv_token_stride = self.kv.data_ptr(), self.kv.stride(0), self.kv.stride(1)
        p.num_blocks, p.page_size_log2 = self.kv.shape[0], self.page.bit_length() - 1
        p.seq_lens, p.seq_lens_stride = self.seq_lens.data_ptr(), 1
        p.block_table, p.block_table_stride, p.max_blocks = self.table.data_ptr(), self.table.stride(0), self.max_blocks
        p.out, p.lse = self.out.data_ptr(), self.lse.data_ptr()
        p.out_stride[:] = self.out.stride()[:3]
        p.lse_stride[:] = self.lse.stride()[:3]
        p.b, p.s_q, p.h_q = self.b, self.s_q, self.h
        p.dtype = {E4M3: 0, torch.bfloat16: 1, torch.float16: 2}[self.dtype]
        p.logit_scale, p.out_scale = self.sm_scale * self.q_scale * self.kv_scale, self.kv_scale
        p.num_kv_splits = self.splits
        return p

    def runner(self, lib):
        p = self.params()
        self.lib = lib
        size = lib.mla_check_workspace(ctypes.byref(p))
        self.workspace = torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device=DEV)
        self.workspace_bytes = size
        message = ctypes.create_string_buffer(512)

        def go():
            stream = torch.cuda.current_stream().cuda_stream
            if lib.mla_check_launch(ctypes.byref(p), self.workspace.data_ptr(), stream, None, None, message, 512):
                raise RuntimeError(message.value.decode())

        return go

    def bounds(self, r):
        """Tiles at which row r is cut."""
        tiles = [(x + 63) // 64 for x in self.lens]
        mine = tiles[r]
        if self.splits:
            n = min(self.splits, mine)
            return [mine * i // n for i in range(n + 1)]
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        rows = sum(x > 0 for x in tiles)
        share = self.lib.mla_check_plan_share(
            sum(tiles), max(tiles), rows, self.s_q * self.h, min(sms, 144), int(self.dtype != E4M3), int(self.page < 64)
        )
        return [0, *range(share - sum(tiles[:r]) % share, mine, share), mine] if share else [0, mine]

    def reference(self, r):
        """(exact out, stage out, lse), float64, of row r."""
        n, lines = self.lens[r], self.s_q * self.h
        self.top = 0.0
        if n == 0:
            z = torch.zeros(self.s_q, self.h, 512, dtype=torch.float64, device=DEV)
            return z, z, torch.full((self.s_q, self.h), -torch.inf, dtype=torch.float64, device=DEV)
        pages = self.table[r, : (n + self.page - 1) // self.page].long()
        kv = self.kv[pages].reshape(-1, 576)[:n].view(self.dtype).double()
        q = self.q[r].double().reshape(lines, 576)
        x = q @ kv.T * (self.sm_scale * self.q_scale * self.kv_scale)
        self.top = float(x.abs().max())
        limit = n - self.s_q + 1 + torch.arange(lines, device=DEV) // self.h
        x = x.masked_fill(torch.arange(n, device=DEV)[None] >= limit[:, None], -torch.inf)
        lse = torch.logsumexp(x, -1)
        exact = torch.nan_to_num(torch.softmax(x, -1)) @ kv[:, :512] * self.kv_scale
        bounds = self.bounds(r)
        outs, lses = [], []
        for first, last in itertools.pairwise(bounds):
            lo, hi = first * 64, min(last * 64, n)
            step = 128 if self.dtype == E4M3 else 64
            steps = (hi - lo + step - 1) // step
            pad = steps * step - (hi - lo)
            xt = torch.nn.functional.pad(x[:, lo:hi], (0, pad), value=-torch.inf).reshape(lines, steps, step)
            m = xt.amax(-1)
            if self.dtype == E4M3:  # the base of a line holds until a step lies SLACK above it
                bases = [torch.full_like(m[:, 0], -torch.inf)]
                for now in m.unbind(1):
                    bases.append(torch.where(now > bases[-1] + SLACK * math.log(2), now, bases[-1]))
                m, top = torch.stack(bases[1:], 1), P_SCALE
            else:
                m, top = m.cummax(1).values, 1
            safe = m.masked_fill(m == -torch.inf, 0)
            p = (torch.exp(xt - safe[..., None]) * top).float().to(self.dtype).double()
            p *= torch.exp(safe - safe[:, -1:])[..., None]
            total = p.sum((1, 2))
            o = p.reshape(lines, -1)[:, : hi - lo] @ kv[lo:hi, :512]
            outs.append(torch.nan_to_num(o / total[:, None]))
            lses.append((torch.log(total / top) + safe[:, -1]).masked_fill(total == 0, -torch.inf))
        lses = torch.stack(lses)
        w = torch.exp(lses - lses.amax(0).masked_fill(lses.amax(0) == -torch.inf, 0))
        stage = torch.nan_to_num((torch.stack(outs) * w[..., None]).sum(0) / w.sum(0)[:, None]) * self.kv_scale
        shape = (self.s_q, self.h, 512)
        return exact.reshape(shape), stage.reshape(shape), lse.reshape(shape[:2])


def compare(name, pr, lib, rows=6):
    go = pr.runner(lib)
    go()
    torch.cuda.synchronize()
    out, lse = pr.out.clone(), pr.lse.clone()
    pr.out.fill_(float("nan"))
    pr.lse.fill_(float("nan"))
    go()
    torch.cuda.synchronize()
    same = bool((out.view(torch.int16) == pr.out.view(torch.int16)).all() and (lse == pr.lse).all())
    finite = bool(torch.isfinite(out).all())
    pick = sorted(set(torch.linspace(0, pr.b - 1, min(rows, pr.b)).long().tolist()))
    err = ref2 = dot = err_s = 0.0
    lse_err = top = 0.0
    for r in pick:
        exact, stage, want = pr.reference(r)
        o = out[r].double()
        top = max(top, pr.top)
        err += float(((o - exact) ** 2).sum())
        err_s += float(((o - stage) ** 2).sum())
        ref2 += float((exact**2).sum())
        dot += float((o * exact).sum())
        empty = want == -torch.inf
        ok = bool(((lse[r] == -torch.inf) == empty).all()) and bool((o[empty] == 0).all())
        lse_err = max(
            lse_err,
            float((lse[r].double() - want)[~empty].abs().max()) if bool((~empty).any()) else 0.0,
            0.0 if ok else 9.0,
        )
    rel, rel_s = (err / max(ref2, 1e-30)) ** 0.5, (err_s / max(ref2, 1e-30)) ** 0.5
    gain = dot / ref2 - 1 if ref2 else 0.0
    # P in e4m3 costs up to 2^-4 a weight: 2.6 % r.m.s. at the most on zero-mean latents; what is left against
    # `stage` is the output's bf16 (0.17 % r.m.s.) and the weights that the tensor core's narrow sum of q.k tips to
    # the other neighbour. That sum takes 18 steps, each cutting at most 2^-13 of the largest running value: 2.2e-3
    # of the largest logit, in lse and (as a relative error of weights) in out. The rounding of P is common to all
    # dims of a line, so gain - 1 averages over lines only: 2 % / sqrt(lines), twice that here, on top of the 0.3 %
    # that are asked for where latents have a mean.
    cut = 18 * 2.0**-13 * max(top, 1.0)
    lines = len(pick) * pr.s_q * pr.h
    good = (same and finite and rel < 0.03 + 0.02 * cut and rel_s < 0.01 + 0.02 * cut and lse_err < 1e-4 + cut
            and abs(gain) < 0.003 + (0.0 if pr.mean else 0.04 / lines**0.5))  # fmt: skip
    verdict = "ok  " if good else "FAIL"
    errors = f"rel {rel:9.2e} stage {rel_s:9.2e} gain-1 {gain:+9.2e} lse {lse_err:8.1e}"
    print(f"{verdict} {name:44s} {errors} same {int(same)} finite {int(finite)}", flush=True)
    return good, out, lse


def correct(lib):
    good = True
    case = dict
    for name, kw in [
        ("b1 h64 s64", case(lens=[64], h=64)),
        ("b1 h64 s1", case(lens=[1], h=64)),
        ("b4 h64 63,65,129,640", case(lens=[63, 65, 129, 640], h=64)),
        ("b4 h16 63,65,129,640", case(lens=[63, 65, 129, 640], h=16)),
        ("b4 h32 63,65,129,640 scales", case(lens=[63, 65, 129, 640], h=32, q_scale=0.5, kv_scale=0.06)),
        ("b5 h128 0,5,0,4096,0", case(lens=[0, 5, 0, 4096, 0], h=128)),
        ("b3 all empty", case(lens=[0, 0, 0], h=16)),
        ("b2 h1 s1000,77", case(lens=[1000, 77], h=1)),
        ("b2 h20 s1000,77", case(lens=[1000, 77], h=20)),
        ("b2 h127 s1000,77 scales 3,2", case(lens=[1000, 77], h=127, q_scale=3.0, kv_scale=2.0)),
        ("b3 h16 s_q2 2,1,700", case(lens=[2, 1, 700], h=16, s_q=2)),
        ("b3 h128 s_q4 4,3,1300", case(lens=[4, 3, 1300], h=128, s_q=4)),
        ("b2 h16 s_q8 65,513", case(lens=[65, 513], h=16, s_q=8)),
        ("b3 h128 page128 13,129,2000", case(lens=[13, 129, 2000], h=128, page=128)),
        ("b3 h16 page256 13,257,2000", case(lens=[13, 257, 2000], h=16, page=256)),
        ("b3 h16 page16 13,257,2000", case(lens=[13, 257, 2000], h=16, page=16)),
        ("b3 h128 page32 13,257,2000", case(lens=[13, 257, 2000], h=128, page=32)),
        ("b3 h64 page1 13,257,700", case(lens=[13, 257, 700], h=64, page=1)),
        ("b128 h128 s4096 auto", case(lens=[4096] * 128, h=128)),
        ("b128 h128 s4096 1 split", case(lens=[4096] * 128, h=128, splits=1)),
        ("b128 h16 s4096 auto", case(lens=[4096] * 128, h=16)),
        ("b128 h16 s4096 1 split", case(lens=[4096] * 128, h=16, splits=1)),
        ("b130 h16 ragged", case(lens=[(i * 977) % 3001 for i in range(130)], h=16)),
        ("b130 h128 ragged", case(lens=[(i * 977) % 3001 for i in range(130)], h=128)),
        ("b1 h128 s32768", case(lens=[32768], h=128)),
        ("b1 h16 s131072 128 splits", case(lens=[131072], h=16, splits=128)),
        ("mean 1 b1 h128 s32768", case(lens=[32768], h=128, mean=1.0)),
        ("mean 1 b1 h128 s32768 1 split", case(lens=[32768], h=128, mean=1.0, splits=1)),
        ("mean 1 q0.1 b1 h16 s131072 1 split", case(lens=[131072], h=16, mean=1.0, q_std=0.1, splits=1)),
        ("mean 1 b16 h128 s8192 1 split", case(lens=[8192] * 16, h=128, mean=1.0, splits=1)),
        ("q std 10 b2 h128 s4096", case(lens=[4096] * 2, h=128, q_std=10.0)),
        ("q std 100 b2 h128 s4096", case(lens=[4096] * 2, h=128, q_std=100.0)),
        ("b130 h16 ragged pinned 7", case(lens=[(i * 977) % 3001 for i in range(130)], h=16, splits=7)),
        ("b40 h128 ragged pinned 3", case(lens=[(i * 977) % 3001 for i in range(40)], h=128, splits=3)),
        ("b6 h128 ragged pinned 100", case(lens=[9000, 1, 700, 8191, 64, 65], h=128, splits=100)),
        *(
            (f"{name} b5 h128 0,5,0,4096,1000", case(lens=[0, 5, 0, 4096, 1000], h=128, dtype=dtype))
            for name, dtype in WIDE
        ),
        *(
            (f"{name} b130 h16 ragged", case(lens=[(i * 977) % 3001 for i in range(130)], h=16, dtype=dtype))
            for name, dtype in WIDE
        ),
        *(
            (f"{name} b3 h128 s_q4 page16 4,3,1300", case(lens=[4, 3, 1300], h=128, s_q=4, page=16, dtype=dtype))
            for name, dtype in WIDE
        ),
        *((f"{name} b1 h128 s32768", case(lens=[32768], h=128, dtype=dtype)) for name, dtype in WIDE),
        *((f"{name} b128 h128 s4096", case(lens=[4096] * 128, h=128, dtype=dtype)) for name, dtype in WIDE),
    ]:
        try:
            good &= compare(name, Problem(**kw), lib)[0]
        except Exception as e:  # a failed launch ends the context: say which case it was
            print("FAIL", name, repr(e)[:300], flush=True)
            return False
    # A row alone gives the bits that it gives in a batch, when the plan is pinned.
    a = Problem([700, 3000, 64, 0, 2048], 16, seed=5, splits=3)
    a.runner(lib)()
    same = True
    for r in range(5):
        one = Problem([700, 3000, 64, 0, 2048], 16, seed=5, splits=3)
        one.b, one.seq_lens = 1, one.seq_lens[r : r + 1].clone()
        one.table, one.q_nope, one.q_pe = one.table[r : r + 1], one.q_nope[r : r + 1], one.q_pe[r : r + 1]
        one.out, one.lse = one.out[r : r + 1], one.lse[r : r + 1]
        one.runner(lib)()
        same &= bool((one.out.view(torch.int16) == a.out[r : r + 1].view(torch.int16)).all())
    print("ok  " if same else "FAIL", "a row alone has the bits it has in a batch", flush=True)
    good &= same
    # One graph, growing lengths.
    g = Problem([3000, 2999, 1500], 128, capacity=3072, hostile=False)
    go = g.runner(lib)
    go()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    g.seq_lens.fill_(1)
    with torch.cuda.graph(graph):
        go()
    same = True
    for k in range(1, 1500, 149):
        g.seq_lens.copy_(torch.tensor([2 * k, k, k], dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        replayed = g.out.clone()
        g.out.fill_(float("nan"))
        go()
        torch.cuda.synchronize()
        same &= bool((replayed.view(torch.int16) == g.out.view(torch.int16)).all())
    print("ok  " if same else "FAIL", "one graph replayed with growing lengths equals eager", flush=True)
    return good and same


def peer(directory, pr, scale):
    """FlashMLA of the vLLM wheel on the same data: a function, or None."""
    try:
        if pr.dtype != E4M3:
            torch.ops.load_library(os.path.join(directory, "_flashmla_C.abi3.so"))
            dense = torch.ops._flashmla_C.dense_decode_fwd
            kv = pr.kv.view(pr.dtype).unsqueeze(2)
            _, _, meta, splits = dense(pr.q, kv, 512, pr.seq_lens, pr.table, scale, True, None, None, None)
            return lambda: dense(pr.q, kv, 512, pr.seq_lens, pr.table, scale, True, meta, splits, None)
        torch.ops.load_library(os.path.join(directory, "_flashmla_extension_C.abi3.so"))
        ops = torch.ops._flashmla_extension_C
        q = pr.q
        kv = pr.kv.view(E4M3).unsqueeze(2)
        one = torch.ones(1, device=DEV)
        meta, splits = ops.get_mla_decoding_metadata_dense_fp8(pr.seq_lens, pr.s_q * pr.h, 1)
        return lambda: ops.fwd_kvcache_mla_fp8(q, kv, 512, pr.seq_lens, pr.table, scale, True, meta, splits, one, one)
    except Exception as e:
        print("peer:", repr(e)[:200])
        return None


SHAPES = [(128, 128, 4096), (128, 128, 8192), (16, 128, 4096), (1, 128, 4096), (1, 128, 32768), (128, 16, 4096),
          (128, 16, 8192), (1, 16, 4096), (1, 16, 32768), (1, 16, 131072)]  # fmt: skip


def bench(libs, peers, shapes):
    from triton.testing import do_bench

    timed = lambda f: do_bench(f, warmup=10, rep=60, return_mode="median") * 1e3  # noqa: E731
    n = 1 << 30
    src, dst = torch.empty(n, dtype=torch.uint8, device=DEV), torch.empty(n, dtype=torch.uint8, device=DEV)
    print(f"copy {2 * n / timed(lambda: dst.copy_(src)) / 1e6:.2f} TB/s", flush=True)
    dst = src = None
    a = torch.randn(8192, 8192, device=DEV).to(E4M3)
    w = torch.randn(8192, 8192, device=DEV).to(E4M3).T
    one = torch.ones((), device=DEV)
    us = timed(lambda: torch._scaled_mm(a, w, one, one, out_dtype=torch.bfloat16, use_fast_accum=True))
    print(f"fp8 gemm {2 * 8192**3 / us / 1e6:.0f} TFLOP/s", flush=True)
    tiny = torch.zeros(1, device=DEV)
    print(f"a kernel that does nothing much: {timed(lambda: tiny.add_(1)):.1f} us", flush=True)
    dtype = {"": E4M3, **dict(WIDE)}[os.environ.get("DTYPE", "")]
    for b, h, s in shapes:
        pr = Problem([s] * b, h, hostile=False, spare=0, dtype=dtype)
        rows = []
        theirs = peer(peers, pr, pr.sm_scale)
        if theirs:
            rows.append(("flashmla", timed(theirs)))
        plans = [int(x) for x in os.environ.get("PLANS", "0,1,2,4,8" if b > 1 else "0,16,32,64,128").split(",")]
        for name, lib in libs:
            for splits in plans:
                if splits and (s + 63) // 64 < splits:
                    continue
                pr.splits = splits
                go = pr.runner(lib)
                try:
                    go()
                    torch.cuda.synchronize()
                except Exception as e:
                    print("FAIL", name, b, h, s, splits, repr(e)[:200])
                    return False
                rows.append((f"{name}/{splits or 'auto'}", timed(go)))
        if theirs:
            rows.append(("flashmla again", timed(theirs)))
        flops, size = 2 * b * h * s * 1088, b * (s * 576 + h * (576 + 1024))
        text = "  ".join(f"{k} {v:.1f}us {flops / v / 1e6:.0f}TF {size / v / 1e6:.2f}TB/s" for k, v in rows)
        print(f"b {b} h {h} s {s}: {text}", flush=True)
        del pr
    return True


def cold(libs, peers, shapes, rounds=20):
    """Graph replays in turns, each after a read of 512 MB: medians.

    s with a u: rows of s - 1000 to s tokens; s/n: n splits.
    """
    buffer = torch.zeros(1 << 27, dtype=torch.int32, device=DEV)
    event = lambda: torch.cuda.Event(enable_timing=True)  # noqa: E731
    for b, h, s in shapes:
        length, _, splits = s.partition("/")
        n = int(length.rstrip("u"))
        lens = [n - (i * 977) % 1001 for i in range(b)] if length.endswith("u") else [n] * b
        pr = Problem(lens, h, hostile=False, spare=0, splits=int(splits or 0))
        calls = {name: pr.runner(lib) for name, lib in libs}
        calls["flashmla"] = peer(peers, pr, pr.sm_scale)
        graphs = {}
        for name, call in calls.items():
            if call is None:
                continue
            call()
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                call()
        marks = []
        for _ in range(3 + rounds):
            for name, graph in graphs.items():
                torch.sum(buffer, 0)
                start, end = event(), event()
                start.record()
                graph.replay()
                end.record()
                marks.append((name, start, end))
        torch.cuda.synchronize()
        for name in graphs:
            us = [1e3 * a.elapsed_time(z) for k, a, z in marks if k == name][3:]
            print(f"b {b} h {h} s {s}: {name} {sorted(us)[len(us) // 2]:.1f} us", flush=True)
    return True


def main():
    path, what = sys.argv[1], sys.argv[2]
    lib = load_library(path.split(",")[0])
    if what == "correct":
        print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda)
        good = correct(lib)
    elif what == "tiny":
        good = all([
            compare("tiny h64", Problem([130, 0, 1000], 64), lib)[0],
            compare("tiny h16 page16", Problem([130, 7], 16, page=16), lib)[0],
            compare("tiny h128 s_q2", Problem([65, 1], 128, s_q=2), lib)[0],
            compare("tiny h128 5 splits", Problem([700], 128, splits=5), lib)[0],
            compare("tiny bf16 h64", Problem([130, 0, 300], 64, dtype=torch.bfloat16), lib)[0],
            compare("tiny fp16 h16 page16", Problem([130, 7], 16, page=16, dtype=torch.float16), lib)[0],
        ])  # fmt: skip
    elif what == "fast":
        good = all([
            compare("h64", Problem([63, 65, 0, 129, 640, 4096], 64), lib)[0],
            compare("h16", Problem([63, 65, 0, 129, 640, 4096], 16), lib)[0],
            compare("h128 s_q2 page128", Problem([2, 1, 700, 1300], 128, s_q=2, page=128), lib)[0],
            compare("h128 b130 ragged", Problem([(i * 977) % 3001 for i in range(130)], 128), lib)[0],
            compare("h16 b130 ragged", Problem([(i * 977) % 3001 for i in range(130)], 16), lib)[0],
            compare("h16 b300 ragged", Problem([8192 - (i * 977) % 1001 for i in range(300)], 16), lib)[0],
            compare("h128 b70 ragged", Problem([(i * 977) % 3001 for i in range(70)], 128), lib)[0],
            compare("bf16 ragged", Problem([(i * 977) % 3001 for i in range(70)], 128, dtype=WIDE[0][1]), lib)[0],
            compare("h128 mean 1", Problem([8192] * 4, 128, mean=1.0, splits=1), lib)[0],
        ])  # fmt: skip
    elif what == "bench":
        libs = [(os.path.basename(x).removeprefix("lib").removesuffix(".so"), load_library(x)) for x in path.split(",")]
        shapes = [tuple(int(x) for x in s.split("x")) for s in sys.argv[4].split(",")] if len(sys.argv) > 4 else SHAPES
        good = bench(libs, sys.argv[3], shapes)
    elif what == "cold":
        libs = [(os.path.basename(x).removeprefix("lib").removesuffix(".so"), load_library(x)) for x in path.split(",")]
        shapes = [tuple(x if i == 2 else int(x) for i, x in enumerate(s.split("x"))) for s in sys.argv[4].split(",")]
        good = cold(libs, sys.argv[3], shapes)
    else:
        b, h, s, splits = (int(x) for x in sys.argv[3:7])
        go = Problem([s] * b, h, splits=splits, hostile=False).runner(lib)
        for _ in range(3):
            go()
        torch.cuda.synchronize()
        good = True
    print("ALL GOOD" if good else "NOT GOOD")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

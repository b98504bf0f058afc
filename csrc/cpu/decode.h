// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Contributors to mla-kernels
//
// MLA decode on a CPU. Included by one unit for each instruction set.
//
//   S[m, t] = (sum_k Q[m, k] K[t, k]) * logit_scale          k < 576
//   O[m, :] = sum_t softmax(S)[m, t] V[t, :] * out_scale      V is the first 512 of K
//
// Shape of a work item: m query rows (up to 64 of the s_q * h_q of one batch row) against one split of that row's
// tokens, in tiles of 64 tokens. For every tile and m rows:
//
//   step     reads                    writes                FLOPs             bytes moved
//   decode   64 rows of the cache     kv [64][576] fp32     -                 36 KB (e4m3) or 72 KB from memory
//   Q Kt     q [576][m], kv           S [64][m] fp32        2 * 64 * 576 m    kv once from L2, a 4 KB block of q from
//   L1 softmax  S                        P [64][m] (in place)  about 25 * 64 m   16 KB at the most, L1 P V      P, kv
//   O [m][512] fp32       2 * 64 * 512 m    kv once from L2, O once
//
// 64 * 1088 * 2 * m FLOPs for 36 KB of e4m3 is 3.8 m FLOPs a byte: with 16 rows 60, so that a core (about 100 GFLOP/s
// in fp32) needs under 2 GB/s from memory. The CPU is bound by FMAs, not by the cache: what counts is that a tile is
// decoded once for all its rows and that both products run from registers. Decoding costs about 64 * 576 / 4 = 9k
// clocks against 64 * 1088 * m / 16 = 70k clocks of FMAs at m = 16 (AVX2).
//
// Both products keep kAccumulators vectors in registers. Q Kt has lanes along query rows: a vector of q (packed [k][m])
// times one broadcast element of kv. P V has lanes along the 512 dims: a vector of kv times one broadcast element of P.
// So neither operand is ever transposed, a lane belongs to one query row, and every row is computed by the same
// sequence of operations wherever it stands: heads, batch mates and threads cannot change a bit.
//
// Points where a value leaves fp32, the same as in the GPU kernels:
//   1. q and kv are read from e4m3, bf16 or fp16 (exact); 2. P = exp(S - running max) * 2^8 is rounded to e4m3 (for
//   bf16 and fp16 inputs: P, unscaled, to that format); 3. out is rounded once to bf16 (fp16).
// fp32 sums: S in nine blocks of 64 k; the P V of a tile alone, then O = O * alpha + tile, which is the promotion; the
// sum of the rounded P, which divides O and weighs splits; the sum of the exact P, which gives lse.
#pragma once

#include "kernel.h"
#include "mla/scheduler.h"
#include "vec.h"

namespace mla::cpu::MLA_ISA {

// What the input format decides: the rounding of P, its power-of-two scale, and the factor that decode() leaves out.
template <DType kType>
struct Format;
template <>
struct Format<DType::kE4M3> {
  static constexpr int kBytes = 1, kFold = kE4M3Fold, kPShift = kLogPScale;
  static MLA_INLINE vf round_p(vf p) { return round_to<3, -6>(p); }
};
template <>
struct Format<DType::kBF16> {
  static constexpr int kBytes = 2, kFold = 0, kPShift = 0;
  static MLA_INLINE vf round_p(vf p) { return round_to<7, -100>(p); }  // P below 2^-100 of the maximum adds nothing
};
template <>
struct Format<DType::kFP16> {
  static constexpr int kBytes = 2, kFold = 0, kPShift = 0;
  static MLA_INLINE vf round_p(vf p) { return round_to<10, -14>(p); }
};

inline constexpr int kBlockM = 2 * kW;  // query rows of one packed block of q
inline constexpr int kBlockK = 64;

MLA_INLINE constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }
MLA_INLINE constexpr float power_of_two(int e) {
  float f = 1.0f;
  for (int i = 0; i < e; ++i) f *= 2.0f;
  return f;
}

struct Tile {
  float* q;   // packed queries: block j of kBlockM rows (the last may have kW) at j * kBlockM * 576, inside [576][rows]
  float* kv;  // [64][576]
  float* s;   // [64][m_pad]
  float* o;   // [m][512]
  float* max;  // [m_pad] running maximum of the scaled logits
  float* sum_rounded;
  float* sum_exact;
  float* alpha;
  int32_t* limit;  // keys that row m sees, counted from the start of the sequence
  int m, m_pad;
};

MLA_INLINE Tile carve(float* scratch, int m) {
  Tile t;
  t.q = scratch;
  t.kv = t.q + kScratchQ;
  t.s = t.kv + kScratchKV;
  t.o = t.s + kScratchS;
  t.max = t.o + kScratchO;
  t.sum_rounded = t.max + kGroupRows;
  t.sum_exact = t.sum_rounded + kGroupRows;
  t.alpha = t.sum_exact + kGroupRows;
  t.limit = reinterpret_cast<int32_t*>(t.alpha + kGroupRows);
  t.m = m;
  t.m_pad = round_up(m, kW);
  return t;
}

// Queries of the group, fp32, packed for Q Kt. Rows that pad the last vector are 0 and are never stored.
template <DType kType>
static void pack_q(const DecodeParams& p, const Item& item, const Tile& t) {
  constexpr int kBytes = Format<kType>::kBytes;
  float row[kDim];
  for (int m = 0; m < t.m_pad; ++m) {
    const int block = m / kBlockM * kBlockM;
    const int width = t.m_pad - block < kBlockM ? t.m_pad - block : kBlockM;
    float* out = t.q + static_cast<int64_t>(block) * kDim + (m - block);
    if (m >= t.m) {
      for (int k = 0; k < kDim; ++k) out[k * width] = 0.0f;
      continue;
    }
    const int64_t token = (item.q_begin + m) / p.h_q, head = (item.q_begin + m) % p.h_q;
    const int64_t nope = item.row * p.q_nope_stride[0] + token * p.q_nope_stride[1] + head * p.q_nope_stride[2];
    const int64_t rope = item.row * p.q_pe_stride[0] + token * p.q_pe_stride[1] + head * p.q_pe_stride[2];
    decode<kType>(static_cast<const char*>(p.q_nope) + nope * kBytes, row, kDimNope);
    decode<kType>(static_cast<const char*>(p.q_pe) + rope * kBytes, row + kDimNope, kDimRope);
    for (int k = 0; k < kDim; ++k) out[k * width] = row[k];
  }
}

// Tokens [begin, begin + n) of the row, decoded. Nothing else of the cache is touched.
template <DType kType>
static void load_tile(const DecodeParams& p, int row, int64_t begin, int n, float* kv) {
  const int32_t* table = p.block_table + row * p.block_table_stride;
  const int64_t in_page = (int64_t{1} << p.page_size_log2) - 1;
  for (int i = 0; i < n; ++i) {
    const int64_t token = begin + i;
    const int64_t page = table[token >> p.page_size_log2];
    const int64_t offset = page * p.kv_page_stride + (token & in_page) * p.kv_token_stride;
    decode<kType>(static_cast<const char*>(p.kv_cache) + offset * Format<kType>::kBytes, kv + i * kDim, kDim);
  }
}

// S[kTokens][kVectors * kW] += K[kTokens][64] Q[64][kVectors * kW]
template <int kTokens, int kVectors>
MLA_INLINE void qk_micro(const float* kv, const float* q, float* s, int m_pad, bool first) {
  vf acc[kTokens][kVectors];
  MLA_UNROLL
  for (int i = 0; i < kTokens; ++i) {
    MLA_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[i][v] = vf{};
  }
  for (int k = 0; k < kBlockK; ++k) {
    vf b[kVectors];
    MLA_UNROLL
    for (int v = 0; v < kVectors; ++v) b[v] = load(q + k * kVectors * kW + v * kW);
    MLA_UNROLL
    for (int i = 0; i < kTokens; ++i) {
      const vf a = set1(kv[i * kDim + k]);
      MLA_UNROLL
      for (int v = 0; v < kVectors; ++v) acc[i][v] = fma(a, b[v], acc[i][v]);
    }
  }
  MLA_UNROLL
  for (int i = 0; i < kTokens; ++i) {
    MLA_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      float* out = s + i * m_pad + v * kW;
      store(out, first ? acc[i][v] : load(out) + acc[i][v]);
    }
  }
}

template <int kTokens, int kVectors>
MLA_INLINE int qk_some(const float* kv, const float* q, float* s, int m_pad, bool first, int i, int n) {
  for (; i + kTokens <= n; i += kTokens) qk_micro<kTokens, kVectors>(kv + i * kDim, q, s + i * m_pad, m_pad, first);
  return i;
}

template <int kVectors>
static void qk_block(const float* kv, const float* q, float* s, int m_pad, int n) {
  constexpr int kTokens = kAccumulators / kVectors;
  for (int k = 0; k < kDim; k += kBlockK) {
    const float* kv_k = kv + k;
    const float* q_k = q + k * kVectors * kW;
    const bool first = k == 0;
    int i = qk_some<kTokens, kVectors>(kv_k, q_k, s, m_pad, first, 0, n);
    i = qk_some<4, kVectors>(kv_k, q_k, s, m_pad, first, i, n);
    qk_some<1, kVectors>(kv_k, q_k, s, m_pad, first, i, n);
  }
}

static void qk(const Tile& t, int n) {
  for (int m = 0; m < t.m_pad; m += kBlockM) {
    const float* q = t.q + static_cast<int64_t>(m) * kDim;
    if (t.m_pad - m >= kBlockM) {
      qk_block<2>(t.kv, q, t.s + m, t.m_pad, n);
    } else {
      qk_block<1>(t.kv, q, t.s + m, t.m_pad, n);
    }
  }
}

// S to logits: scaled, and -inf where the token is in the future of the query (limits are all past the tile mostly).
static void scale_and_mask(const Tile& t, int64_t tile, int n, float scale) {
  for (int i = 0; i < n * t.m_pad; i += kW) store(t.s + i, load(t.s + i) * scale);
  if (t.limit[0] >= tile + n) return;
  for (int m = 0; m < t.m_pad; ++m)
    for (int64_t i = t.limit[m] > tile ? t.limit[m] - tile : 0; i < n; ++i) t.s[i * t.m_pad + m] = -__builtin_inff();
}

// S to P in place, with the running maximum, both sums, and alpha for O. Lanes are query rows.
template <DType kType>
static void softmax(const Tile& t, int n) {
  using F = Format<kType>;
  for (int m = 0; m < t.m_pad; m += kW) {
    float* s = t.s + m;
    const vf before = load(t.max + m);
    vf after = before;
    for (int i = 0; i < n; ++i) after = max(load(s + i * t.m_pad), after);
    const vf base = after > -__builtin_inff() ? after : vf{};  // a row that has seen no key yet
    const vf alpha = exp_scaled<0>(before - base);
    vf rounded = vf{}, exact = vf{};
    for (int i = 0; i < n; ++i) {
      const vf e = exp_scaled<F::kPShift>(load(s + i * t.m_pad) - base);
      const vf r = F::round_p(e);
      exact = exact + e;
      rounded = rounded + r;
      store(s + i * t.m_pad, r);
    }
    store(t.max + m, after);
    store(t.alpha + m, alpha);
    store(t.sum_exact + m, fma(load(t.sum_exact + m), alpha, exact));
    store(t.sum_rounded + m, fma(load(t.sum_rounded + m), alpha, rounded));
  }
}

// O[kRows][kVectors * kW] = O * alpha + P[n][kRows] V[n][kVectors * kW], the product summed by itself
template <int kRows, int kVectors>
MLA_INLINE void pv_micro(const float* p, int m_pad, const float* kv, int n, float* o, const float* alpha) {
  vf acc[kRows][kVectors];
  MLA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MLA_UNROLL
    for (int v = 0; v < kVectors; ++v) acc[r][v] = vf{};
  }
  for (int i = 0; i < n; ++i) {
    vf b[kVectors];
    MLA_UNROLL
    for (int v = 0; v < kVectors; ++v) b[v] = load(kv + i * kDim + v * kW);
    MLA_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const vf a = set1(p[i * m_pad + r]);
      MLA_UNROLL
      for (int v = 0; v < kVectors; ++v) acc[r][v] = fma(a, b[v], acc[r][v]);
    }
  }
  MLA_UNROLL
  for (int r = 0; r < kRows; ++r) {
    MLA_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      float* out = o + r * kDimNope + v * kW;
      store(out, fma(load(out), set1(alpha[r]), acc[r][v]));
    }
  }
}

// As many blocks of kRows as fit into rows [m, m_end); returns the first row that is left.
template <int kRows, int kVectors>
MLA_INLINE int pv_some(const Tile& t, int n, int d, int m, int m_end) {
  for (; m + kRows <= m_end; m += kRows)
    pv_micro<kRows, kVectors>(t.s + m, t.m_pad, t.kv + d, n, t.o + static_cast<int64_t>(m) * kDimNope + d, t.alpha + m);
  return m;
}

// Query rows [m_begin, m_end), which all see n tokens of the tile. Few rows take more vectors, to keep the FMA units
// busy.
static void pv(const Tile& t, int m_begin, int m_end, int n) {
  constexpr int kVectors = kAccumulators / 6;
  static_assert(kDimNope % (4 * kVectors * kW) == 0);
  int m = m_begin;
  for (int d = 0; d < kDimNope; d += kVectors * kW) {
    m = pv_some<6, kVectors>(t, n, d, m_begin, m_end);
    m = pv_some<4, kVectors>(t, n, d, m, m_end);
  }
  const int m_2 = m;
  for (int d = 0; d < kDimNope; d += 2 * kVectors * kW) m = pv_some<2, 2 * kVectors>(t, n, d, m_2, m_end);
  const int m_1 = m;
  for (int d = 0; d < kDimNope; d += 4 * kVectors * kW) pv_some<1, 4 * kVectors>(t, n, d, m_1, m_end);
}

// One row of the result: o * factor, rounded once.
static void write_row(const DecodeParams& p, const Item& item, int m, const float* o, float factor, float lse) {
  const int64_t token = (item.q_begin + m) / p.h_q, head = (item.q_begin + m) % p.h_q;
  uint16_t* out =
      static_cast<uint16_t*>(p.out) + item.row * p.out_stride[0] + token * p.out_stride[1] + head * p.out_stride[2];
  if (p.dtype == DType::kFP16) {
    for (int d = 0; d < kDimNope; ++d) out[d] = to_fp16(o[d] * factor);
  } else {
    for (int d = 0; d < kDimNope; ++d) out[d] = to_bf16(o[d] * factor);
  }
  p.lse[item.row * p.lse_stride[0] + token * p.lse_stride[1] + head * p.lse_stride[2]] = lse;
}

template <DType kType>
static void run_typed(const DecodeParams& p, const Item& item, float* scratch) {
  using F = Format<kType>;
  const Tile t = carve(scratch, item.q_rows);
  const int64_t seq_len = p.seq_lens[item.row * p.seq_lens_stride];
  const int64_t begin = split_begin(seq_len, item.n_splits, item.split);
  int64_t end = split_begin(seq_len, item.n_splits, item.split + 1);
  const float fold = power_of_two(F::kFold);

  for (int m = 0; m < t.m_pad; ++m) {
    const int64_t token = (item.q_begin + (m < t.m ? m : t.m - 1)) / p.h_q;
    const int64_t limit = seq_len - p.s_q + token + 1;
    t.limit[m] = static_cast<int32_t>(limit > 0 ? limit : 0);
    t.max[m] = -__builtin_inff();
    t.sum_rounded[m] = t.sum_exact[m] = 0.0f;
  }
  __builtin_memset(t.o, 0, sizeof(float) * kDimNope * t.m);
  if (end > t.limit[t.m - 1]) end = t.limit[t.m - 1];  // limits grow with the query token

  if (begin < end) pack_q<kType>(p, item, t);
  for (int64_t tile = begin; tile < end; tile += kBlockN) {
    const int n = static_cast<int>(end - tile < kBlockN ? end - tile : kBlockN);
    load_tile<kType>(p, item.row, tile, n, t.kv);
    qk(t, n);
    scale_and_mask(t, tile, n, p.logit_scale * (fold * fold));
    softmax<kType>(t, n);
    for (int m = 0;
         m < t.m;) {  // rows of one query token see the same keys; a key that a row does not see is not multiplied
      int m_end = m + 1;
      while (m_end < t.m && t.limit[m_end] == t.limit[m]) ++m_end;
      const int64_t seen = t.limit[m] - tile;
      pv(t, m, m_end, static_cast<int>(seen < 0 ? 0 : seen < n ? seen : n));
      m = m_end;
    }
  }

  for (int m = 0; m < t.m; ++m) {
    const float* o = t.o + static_cast<int64_t>(m) * kDimNope;
    const float sum = t.sum_rounded[m];
    const bool empty = sum == 0.0f;
    const float inverse = empty ? 0.0f : 1.0f / sum;
    const double unscale = -F::kPShift * 0.69314718055994530942;
    const float lse =
        empty ? -__builtin_inff() : static_cast<float>(t.max[m] + (__builtin_log(double{t.sum_exact[m]}) + unscale));
    if (item.n_splits == 1) {
      write_row(p, item, m, o, inverse * (p.out_scale * fold), lse);
    } else {
      const int64_t at = static_cast<int64_t>(item.split) * item.q_rows + m;
      float* out = item.partial + at * kDimNope;
      float* out_lse = item.partial + static_cast<int64_t>(item.n_splits) * item.q_rows * kDimNope + at * 2;
      for (int d = 0; d < kDimNope; ++d) out[d] = o[d] * (inverse * fold);
      out_lse[0] = empty ? -__builtin_inff() : static_cast<float>(t.max[m] + (__builtin_log(double{sum}) + unscale));
      out_lse[1] = lse;
    }
  }
}

// logsumexp over the splits of one row; returns -inf where all are empty, NaN where one is NaN.
static float merge_lse(const float* lse, int n_splits, int64_t stride) {
  float top = -__builtin_inff();
  double sum = 0.0;
  for (int i = 0; i < n_splits; ++i) top = lse[i * stride] > top ? lse[i * stride] : top;
  for (int i = 0; i < n_splits; ++i)
    sum += lse[i * stride] == -__builtin_inff() ? 0.0 : __builtin_exp(double{lse[i * stride]} - top);
  return sum == 0.0 ? -__builtin_inff() : static_cast<float>(top + __builtin_log(sum));
}

// out = sum_i exp(lse_i - lse) O_i over the fp32 partials, in the order of the splits.
static void combine(const DecodeParams& p, const Item& item, int begin, int end) {
  const int64_t rows = item.q_rows;
  const float* all_lse = item.partial + item.n_splits * rows * kDimNope;
  for (int m = begin; m < end; ++m) {
    const float* lse = all_lse + 2 * m;
    const float weight_lse = merge_lse(lse, item.n_splits, 2 * rows);
    alignas(64) float o[kDimNope] = {};
    for (int i = 0; i < item.n_splits; ++i) {
      const float part = lse[i * 2 * rows];
      if (part == -__builtin_inff()) continue;
      const vf weight = set1(static_cast<float>(__builtin_exp(double{part} - weight_lse)));
      const float* in = item.partial + (i * rows + m) * kDimNope;
      for (int d = 0; d < kDimNope; d += kW) store(o + d, fma(weight, load(in + d), load(o + d)));
    }
    write_row(p, item, m, o, p.out_scale, merge_lse(lse + 1, item.n_splits, 2 * rows));
  }
}

static void run(const DecodeParams& p, const Item& item, float* scratch) {
  switch (p.dtype) {
    case DType::kE4M3:
      return run_typed<DType::kE4M3>(p, item, scratch);
    case DType::kBF16:
      return run_typed<DType::kBF16>(p, item, scratch);
    default:
      return run_typed<DType::kFP16>(p, item, scratch);
  }
}

#define MLA_STRING_(x) #x
#define MLA_STRING(x) MLA_STRING_(x)
static constexpr Kernels kKernels{MLA_STRING(MLA_ISA), run, combine};

}  // namespace mla::cpu::MLA_ISA

const mla::cpu::Kernels& mla::cpu::MLA_KERNELS() { return mla::cpu::MLA_ISA::kKernels; }

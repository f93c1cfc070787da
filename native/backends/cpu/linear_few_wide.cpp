// linear for one to eight bf16 tokens on weights in blocks of 256, in AVX-512: as linear_few_codes.cpp, with scales for units
// of 32 or 16 of a block's elements.
#include "fixed_point.h"
#include "linear.h"
#include "wide_blocks.h"

#if defined(__AVX512F__)

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kMaxTokens = 8;
constexpr int64_t kWide = 256, kUnits = kWide / kFixedBlock;  // elements of a block, and blocks of fixed point in it
constexpr int64_t kTaskRows = 64;                             // the most rows of a task

// Tokens as the products read them.
struct Tokens {
  int count;        // 1, 2, 4 or 8: those that are missing are zero
  int64_t units;    // of one token
  int32_t *values;  // [count][units][16]
  int32_t *biases;  // [count][units][16]: what a sum of products begins at
  float *steps;     // [count][units]
  float *sums;      // [count][units]
};

// Codes: `read` gives those of unit j, twice, for upper and lower digits; `convert` the scales of a block, kFactors for each
// unit, and what is added to its values; kBias: how much too large codes are, if there is no such offset.

// Scales and minimums of six bits, packed as quant.h's unpack_scale says.
template <bool has_high>
struct SixBitScales {
  static constexpr int kBytes = has_high ? 176 : 144, kFactors = 1, kBias = 0;
  static constexpr bool kHasOffset = true;
  static __m512i read(const uint8_t *block, int j) {
    const __m512i bytes = twice(block + (has_high ? 48 : 16) + j / 2 * 32);
    const __m512i code = _mm512_and_si512(_mm512_srli_epi16(bytes, j % 2 * 4), _mm512_set1_epi8(15));
    if constexpr (!has_high) return code;
    const __mmask64 high = _mm512_test_epi8_mask(twice(block + 16), _mm512_set1_epi8(static_cast<char>(1 << j)));
    return _mm512_mask_add_epi8(code, high, code, _mm512_set1_epi8(16));
  }
  static vf factor(const float *scale) { return vset(*scale); }
  static void convert(const uint8_t *block, float *scales, float *offsets) { read_six_bit_scales(block, scales, offsets); }
};

// Scales of eight bits for units of 16, codes of six.
struct EightBitScales {
  static constexpr int kBytes = 210, kFactors = 8, kBias = 32;
  static constexpr bool kHasOffset = false;
  static __m512i read(const uint8_t *block, int j) {
    const int half = j / 4, group = j % 4;
    const __m512i nibbles = twice(block + 64 * half + 32 * (group % 2)), pairs = twice(block + 128 + 32 * half);
    const __m512i low = _mm512_and_si512(_mm512_srli_epi16(nibbles, group / 2 * 4), _mm512_set1_epi8(15));
    const __m512i high = group == 3 ? _mm512_srli_epi16(pairs, 2) : _mm512_slli_epi16(pairs, 4 - 2 * group);
    return _mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi8(48)));
  }
  static vf factor(const float *scale) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(scale)); }
  static void convert(const uint8_t *block, float *scales, float *) {
    const vf all = vmul(vto_float(vload_i8(block + 192)), vset(load_half(block + 208)));
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    for (int j = 0; j < kUnits; j += 2) {
      vstore(scales + j * kFactors, _mm512_permutexvar_ps(_mm512_add_epi32(first, vset_int(2 * j)), all));
    }
  }
};

template <int32_t dtype>
struct Codes;
template <>
struct Codes<SG_Q4_K> : SixBitScales<false> {};
template <>
struct Codes<SG_Q5_K> : SixBitScales<true> {};
template <>
struct Codes<SG_Q6_K> : EightBitScales {};

struct Task {
  const uint8_t *weight;
  int64_t row_bytes, begin, end;  // rows
};

// sums[t][0 .. kRows) of the rows from `rows` on; scales, offsets: of each of them.
template <class C, int kRows, int kTokens>
inline void multiply_rows(const uint8_t *rows, int64_t row_bytes, const Tokens &x, float *scales, float *offsets,
                          float *sums) {
  const int64_t blocks = x.units / kUnits;
  for (int r = 0; r < kRows; ++r) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t unit = r * x.units + b * kUnits;
      C::convert(rows + r * row_bytes + b * C::kBytes, scales + unit * C::kFactors, offsets + unit);
    }
  }
  vf c[kRows * kTokens];
  for (auto &sum : c) sum = vzero();
  FetchAhead ahead(rows, kRows * row_bytes, blocks);
  for (int64_t b = 0; b < blocks; ++b) {
    ahead.step();
#pragma GCC unroll 8
    for (int j = 0; j < kUnits; ++j) {
      const int64_t unit = b * kUnits + j;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m512i codes = C::read(rows + r * row_bytes + b * C::kBytes, j);
        const vf factor = C::factor(scales + (r * x.units + unit) * C::kFactors);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          const int64_t at = t * x.units + unit;
          const __m512i begin = C::kBias != 0 ? _mm512_loadu_si512(x.biases + at * kFixedWords) : _mm512_setzero_si512();
          const __m512i dot = _mm512_dpbusd_epi32(begin, codes, _mm512_loadu_si512(x.values + at * kFixedWords));
          c[r * kTokens + t] = vfma(vmul(vto_float(dot), vset(x.steps[at])), factor, c[r * kTokens + t]);
        }
      }
    }
  }
  const vf lanes = _mm512_insertf32x8(vset(256.0f), _mm256_set1_ps(1.0f), 1);
  for (auto &sum : c) sum = vmul(sum, lanes);
  if constexpr (C::kHasOffset) {
    for (int64_t u = 0; u < x.units; u += kUnits) {
      for (int r = 0; r < kRows; ++r) {
        const vf offset = vload_n(offsets + r * x.units + u, kUnits);
        for (int t = 0; t < kTokens; ++t) {
          c[r * kTokens + t] = vfma(offset, vload_n(x.sums + t * x.units + u, kUnits), c[r * kTokens + t]);
        }
      }
    }
  }
  alignas(64) float all[kRows * kTokens];
  for (int i = 0; i < kRows * kTokens; i += 4) _mm_store_ps(all + i, sum_each(c + i));
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) sums[t * kTaskRows + r] = all[r * kTokens + t];
  }
}

template <class C, int kTokens>
void multiply_task(const Task &task, const Tokens &x, float *scratch, float *sums) {
  constexpr int kRows = kTokens <= 2 ? 4 : kTokens == 4 ? 2 : 1;
  float *scales = scratch, *offsets = scratch + kRows * x.units * C::kFactors;
  for (int64_t row = task.begin; row < task.end; row += kRows) {
    const int64_t start = std::min(row, task.end - kRows);  // the last rows may be computed again, never past the end
    float *out = sums + std::max(start, task.begin) - task.begin;
    if (start >= task.begin) {
      multiply_rows<C, kRows, kTokens>(task.weight + start * task.row_bytes, task.row_bytes, x, scales, offsets, out);
      continue;
    }
    float all[kMaxTokens * kTaskRows];
    multiply_rows<C, kRows, kTokens>(task.weight + start * task.row_bytes, task.row_bytes, x, scales, offsets, all);
    for (int t = 0; t < kTokens; ++t) {
      const float *from = all + t * kTaskRows;
      std::copy(from + task.begin - start, from + kRows, sums + t * kTaskRows);
    }
  }
}

template <class C>
void read_tokens(const LinearProblem &p, const Tokens &x) {
  const __m512i bias = _mm512_set1_epi8(C::kBias);
  for (int64_t t = 0; t < x.count; ++t) {
    const bf16 *row = static_cast<const bf16 *>(p.a.data) + t * p.a.stride;
    for (int64_t u = 0; u < x.units; ++u) {
      const int64_t at = t * x.units + u;
      int32_t *values = x.values + at * kFixedWords;
      if (t < p.m) {
        _mm512_storeu_si512(values, to_digits(to_fixed_point(row + u * kFixedBlock, x.steps + at, x.sums + at)));
      } else {
        _mm512_storeu_si512(values, _mm512_setzero_si512());
        x.steps[at] = x.sums[at] = 0.0f;
      }
      if constexpr (C::kBias != 0) {
        const __m512i zero = _mm512_setzero_si512(), sums = _mm512_dpbusd_epi32(zero, bias, _mm512_loadu_si512(values));
        _mm512_storeu_si512(x.biases + at * kFixedWords, _mm512_sub_epi32(zero, sums));
      }
    }
  }
}

using Formats = FormatList<SG_Q4_K, SG_Q5_K, SG_Q6_K>;

int32_t supports(const sg_call *call) {
  LinearProblem p;
  if (!read_linear<LinearOp::forward>(call, &p) || p.m < 1 || p.m > kMaxTokens || p.n < 4 || p.k < kWide) return 0;
  if (p.a.dtype != SG_BF16 || !Formats::has(p.b.dtype)) return 0;
  return isa_score(SG_ISA_NAME) > 0 ? isa_score(SG_ISA_NAME) + (p.m <= 2 ? 55 : 45) : 0;
}

// Floats of workspace: the tokens, then for each worker scales and offsets of four rows and a task's sums.
struct Layout {
  int64_t units, token_floats, worker_floats;
  explicit Layout(int64_t width)
      : units(width / kFixedBlock), token_floats(kMaxTokens * units * (2 * kFixedWords + 2)),
        worker_floats(round_up(4 * units * 9, 16) + kMaxTokens * kTaskRows) {}
};

size_t workspace(const sg_call *call) {
  const Layout layout(input(call, 0)->shape[1]);
  return static_cast<size_t>(layout.token_floats + layout.worker_floats * num_workers(call)) * sizeof(float);
}

template <int32_t dtype>
void run_on(const sg_call *call, const LinearProblem &p) {
  using C = Codes<dtype>;
  const Layout layout(p.k);
  const int count = p.m <= 2 ? static_cast<int>(p.m) : p.m <= 4 ? 4 : 8;
  float *space = static_cast<float *>(call->workspace);
  auto *values = reinterpret_cast<int32_t *>(space);
  const int64_t words = kMaxTokens * layout.units * kFixedWords;
  float *steps = space + 2 * words;
  const Tokens x{count, layout.units, values, values + words, steps, steps + kMaxTokens * layout.units};
  read_tokens<C>(p, x);
  const auto multiply = count == 1   ? multiply_task<C, 1>
                        : count == 2 ? multiply_task<C, 2>
                        : count == 4 ? multiply_task<C, 4>
                                     : multiply_task<C, 8>;
  float *workers = space + layout.token_floats;
  const int64_t task_rows = p.n >= 1024 ? kTaskRows : 32;
  parallel_for(call, (p.n + task_rows - 1) / task_rows, [&](int64_t index, int worker) {
    float *scratch = workers + worker * layout.worker_floats;
    float *sums = scratch + layout.worker_floats - kMaxTokens * kTaskRows;
    const int64_t begin = index * task_rows, end = std::min(p.n, begin + task_rows);
    multiply({static_cast<const uint8_t *>(p.b.data), p.b.row_bytes, begin, end}, x, scratch, sums);
    p.finish(0, static_cast<int>(p.m), begin, static_cast<int>(end - begin), sums, kTaskRows);
  });
}

int32_t run(const sg_call *call) {
  LinearProblem p;
  const bool known = read_linear<LinearOp::forward>(call, &p) &&
                     Formats::with(p.b.dtype, [&](auto tag) { run_on<decltype(tag)::value>(call, p); });
  return known ? SG_OK : fail(call, "linear: operands changed since the kernel was chosen");
}

constexpr sg_kernel linear{sizeof(sg_kernel), "linear", "cpu", SG_ISA_NAME "_bf16_wide_few",
                           SG_TRAIT_DETERMINISTIC | SG_TRAIT_IN_PLACE, 3, supports, workspace, nullptr, nullptr, run};
SG_REGISTER_KERNEL(linear);

}  // namespace
}  // namespace sg::cpu::SG_ISA

#endif

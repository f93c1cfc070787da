// linear for one to eight bf16 tokens on weights of 4, 5 and 8 bits, in AVX-512. As linear_few.cpp it reads the weight once and
// in place, but it multiplies the codes, as integers, and scales a block's sum instead of its values. The tokens become
// fixed-point numbers (fixed_point.h), whose products and sums within a block are exact. A token's sums are formed in one
// order whatever the number of tokens.
#include "fixed_point.h"
#include "linear.h"

#if defined(__AVX512F__)

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kMaxTokens = 8;
constexpr int64_t kGroup = 4;         // rows whose scales are converted together and whose sums are reduced together
constexpr int64_t kTaskRows = 128;    // the most rows of a task
constexpr int64_t kAhead = 8192;      // bytes between what is multiplied and what is fetched

// Tokens as the products read them; arrays of one token follow those of another.
struct Tokens {
  int count;               // 1, 2, 4 or 8: those that are missing are zero
  int64_t blocks, padded;  // of one token; padded to whole vectors of block sums
  int32_t *values;         // [count][blocks][16]: fixed point, as `dot` reads it
  float *sums;             // [count][padded]: of each block
  float *steps;            // [count][kGroup * blocks + kLanes]: of each block, once for each row of a group
  int64_t steps_stride() const { return kGroup * blocks + kLanes; }
};

// Nibbles stay where they are in their bytes. A block's 16 bytes are repeated in the four lanes: low nibbles, high nibbles
// (sixteen times too large) with the tokens' upper digits, and both again with the lower ones. What the lanes of a sum count
// for, `lanes`, is multiplied in at the end.
template <int bytes, int header>
struct Nibbles {
  static constexpr int kBytes = bytes, kHeader = header;
  static constexpr bool kHasOffset = true;
  static __m512i codes(const uint8_t *p) {
    const __m512i mask = _mm512_set_epi64(-0x0f0f0f0f0f0f0f10, -0x0f0f0f0f0f0f0f10, 0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f,
                                          -0x0f0f0f0f0f0f0f10, -0x0f0f0f0f0f0f0f10, 0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f);
    return _mm512_and_si512(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), mask);
  }
  static __m512i dot(__m512i codes, const int32_t *x) {
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, _mm512_loadu_si512(x));
  }
  static vf lanes() {
    return _mm512_setr_ps(256, 256, 256, 256, 16, 16, 16, 16, 1, 1, 1, 1, 0.0625f, 0.0625f, 0.0625f, 0.0625f);
  }
  static void put(__m512i x, int32_t *out) { _mm512_storeu_si512(out, to_digits(x)); }
};

// Five bits: the nibbles are moved down, so that the fifth ones, 32 bits before the nibbles, find room above them.
template <int bytes, int header>
struct FiveBits : Nibbles<bytes, header> {
  static __m512i codes(const uint8_t *p) {
    const __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 0, 0, 0, 0, 4, 4, 4, 4);
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    const __m512i low = _mm512_and_si512(_mm512_srlv_epi32(all, shifts), _mm512_set1_epi8(15));
    const __mmask64 high = load_u32(p - 4) * 0x100000001u;
    return _mm512_mask_add_epi8(low, high, low, _mm512_set1_epi8(16));
  }
  static vf lanes() { return _mm512_setr_ps(256, 256, 256, 256, 256, 256, 256, 256, 1, 1, 1, 1, 1, 1, 1, 1); }
};

template <int32_t dtype>
struct Codes;
template <>
struct Codes<SG_Q4_0> : Nibbles<18, 2> {
  static vf offset(vf d, __m512i) { return vmul(d, vset(-8.0f)); }
};
template <>
struct Codes<SG_Q4_1> : Nibbles<20, 4> {
  static vf offset(vf, __m512i fields) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(fields, 16)));
  }
};
template <>
struct Codes<SG_Q5_0> : FiveBits<22, 6> {
  static vf offset(vf d, __m512i) { return vmul(d, vset(-16.0f)); }
};
template <>
struct Codes<SG_Q5_1> : FiveBits<24, 8> {
  static vf offset(vf d, __m512i fields) { return Codes<SG_Q4_1>::offset(d, fields); }
};
template <>
struct Codes<SG_Q8_0> {
  static constexpr int kBytes = 34, kHeader = 2;
  static constexpr bool kHasOffset = false;
  static __m512i codes(const uint8_t *p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  }
  static __m512i dot(__m512i codes, const int32_t *x) { return _mm512_madd_epi16(codes, _mm512_loadu_si512(x)); }
  static vf lanes() { return vset(1.0f); }
  static void put(__m512i x, int32_t *out) { _mm512_storeu_si512(out, x); }
  static vf offset(vf, __m512i) { return vzero(); }
};

// Of every block of a group of rows: scale[t][b], its scale times the token's step, and offset[b],
// what is added to every value.
template <class C>
void convert_scales(const uint8_t *rows, const Tokens &x, float *scale, float *offset) {
  const int64_t count = kGroup * x.blocks;
  const __m512i offsets = _mm512_mullo_epi32(viota(), vset_int(C::kBytes));
  for (int64_t i = 0; i < count; i += kLanes) {
    const auto lanes = static_cast<__mmask16>(count - i >= kLanes ? 0xffff : (1u << (count - i)) - 1u);
    const __m512i fields = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes, offsets, rows + i * C::kBytes, 1);
    const vf d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(fields));
    for (int t = 0; t < x.count; ++t) {
      vstore(scale + t * x.steps_stride() + i, vmul(d, vload(x.steps + t * x.steps_stride() + i)));
    }
    if constexpr (C::kHasOffset) vstore(offset + i, C::offset(d, fields));
  }
}

// sums[t][0 .. kRows) of kRows rows of a group, from its row `first` on.
template <class C, int kRows, int kTokens>
inline void multiply_rows(const uint8_t *rows, int64_t row_bytes, int first, const Tokens &x, const float *scale,
                          const float *offset, float *sums, int64_t sums_stride) {
  vf c[kRows * kTokens];
  for (auto &sum : c) sum = vzero();
  const int64_t blocks = x.blocks;
  const uint8_t *p = rows + first * row_bytes + C::kHeader;
  const float *s = scale + first * blocks;
  const int32_t *values = x.values;
  const char *ahead = reinterpret_cast<const char *>(p) + kAhead;
  for (int64_t b = 0; b < blocks; ++b, p += C::kBytes, values += kFixedWords) {
    // The next rows are asked for early: a row is too short for the hardware to see where the reading goes.
    for (int byte = 0; byte < kRows * C::kBytes; byte += 64) _mm_prefetch(ahead + byte, _MM_HINT_T0);
    ahead += kRows * C::kBytes;
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m512i codes = C::codes(p + r * row_bytes);
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const vf factor = vset(s[t * x.steps_stride() + r * blocks + b]);
        c[r * kTokens + t] = vfma(vto_float(C::dot(codes, values + t * blocks * kFixedWords)), factor, c[r * kTokens + t]);
      }
    }
  }
  for (auto &sum : c) sum = vmul(sum, C::lanes());
  if constexpr (C::kHasOffset) {
    for (int64_t b = 0; b < blocks; b += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, blocks - b));
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const vf m = vload_n(offset + (first + r) * blocks + b, n);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) c[r * kTokens + t] = vfma(m, vload(x.sums + t * x.padded + b), c[r * kTokens + t]);
      }
    }
  }
  alignas(64) float all[kRows * kTokens];
  for (int i = 0; i < kRows * kTokens; i += 4) _mm_store_ps(all + i, sum_each(c + i));
  for (int r = 0; r < kRows; ++r) {
    for (int t = 0; t < kTokens; ++t) sums[t * sums_stride + r] = all[r * kTokens + t];
  }
}

struct Task {
  const uint8_t *weight;
  int64_t row_bytes, begin, end;  // rows
};

template <class C, int kTokens>
void multiply(const Task &task, const Tokens &x, float *scratch, float *sums) {
  constexpr int kRows = kTokens == 8 ? 2 : 4;
  float *scale = scratch;
  float *offset = scale + kTokens * x.steps_stride();
  alignas(64) float group[kTokens * kGroup];
  for (int64_t row = task.begin; row < task.end; row += kGroup) {
    const int64_t start = std::min(row, task.end - kGroup);  // the last group may compute rows again, never past the end
    const uint8_t *rows = task.weight + start * task.row_bytes;
    convert_scales<C>(rows, x, scale, offset);
    for (int r = 0; r < kGroup; r += kRows) {
      multiply_rows<C, kRows, kTokens>(rows, task.row_bytes, r, x, scale, offset, group + r, kGroup);
    }
    for (int64_t r = row - start; r < kGroup; ++r) {
      for (int t = 0; t < kTokens; ++t) sums[t * kTaskRows + start + r - task.begin] = group[t * kGroup + r];
    }
  }
}

template <class C>
void multiply_tokens(const Task &task, const Tokens &x, float *scratch, float *sums) {
  switch (x.count) {
    case 1: return multiply<C, 1>(task, x, scratch, sums);
    case 2: return multiply<C, 2>(task, x, scratch, sums);
    case 4: return multiply<C, 4>(task, x, scratch, sums);
    default: return multiply<C, 8>(task, x, scratch, sums);
  }
}

template <class C>
void read_tokens(const LinearProblem &p, const Tokens &x) {
  for (int64_t t = 0; t < x.count; ++t) {
    int32_t *values = x.values + t * x.blocks * kFixedWords;
    float *sums = x.sums + t * x.padded, *steps = x.steps + t * x.steps_stride();
    std::fill(sums, sums + x.padded, 0.0f);
    std::fill(steps, steps + x.steps_stride(), 0.0f);
    if (t >= p.m) {
      std::fill(values, values + x.blocks * kFixedWords, 0);
      continue;
    }
    const bf16 *row = static_cast<const bf16 *>(p.a.data) + t * p.a.stride;
    for (int64_t b = 0; b < x.blocks; ++b) {
      C::put(to_fixed_point(row + b * kFixedBlock, steps + b, sums + b), values + b * kFixedWords);
    }
    for (int64_t r = 1; r < kGroup; ++r) std::copy(steps, steps + x.blocks, steps + r * x.blocks);
  }
}

// Floats of workspace: the tokens, then for each worker scales, offsets and a task's sums.
struct Layout {
  int64_t blocks, padded, steps, worker_floats, token_floats;
  explicit Layout(int64_t width)
      : blocks(width / kFixedBlock), padded(round_up(blocks, kLanes)), steps(kGroup * blocks + kLanes),
        worker_floats((kMaxTokens + 1) * steps + kMaxTokens * kTaskRows),
        token_floats(kMaxTokens * (blocks * kFixedWords + padded + steps)) {}
};

using Formats = FormatList<SG_Q4_0, SG_Q4_1, SG_Q5_0, SG_Q5_1, SG_Q8_0>;

int32_t supports(const sg_call *call) {
  LinearProblem p;
  if (!read_linear<LinearOp::forward>(call, &p) || p.m < 1 || p.m > kMaxTokens || p.n < kGroup || p.k < kFixedBlock) return 0;
  if (p.a.dtype != SG_BF16 || !Formats::has(p.b.dtype)) return 0;
  return isa_score(SG_ISA_NAME) > 0 ? isa_score(SG_ISA_NAME) + 45 : 0;
}

size_t workspace(const sg_call *call) {
  const Layout layout(input(call, 0)->shape[1]);
  return static_cast<size_t>(layout.token_floats + layout.worker_floats * num_workers(call)) * sizeof(float);
}

template <int32_t dtype>
void run_on(const sg_call *call, const LinearProblem &p) {
  using C = Codes<dtype>;
  const Layout layout(p.k);
  float *space = static_cast<float *>(call->workspace);
  const int count = p.m <= 2 ? static_cast<int>(p.m) : p.m <= 4 ? 4 : 8;
  float *sums = space + kMaxTokens * layout.blocks * kFixedWords;
  const Tokens x{count, layout.blocks, layout.padded, reinterpret_cast<int32_t *>(space), sums,
                 sums + kMaxTokens * layout.padded};
  read_tokens<C>(p, x);
  float *workers = space + layout.token_floats;
  const int64_t task_rows = p.n >= 4096 ? kTaskRows : 32;
  parallel_for(call, (p.n + task_rows - 1) / task_rows, [&](int64_t index, int worker) {
    float *scratch = workers + worker * layout.worker_floats, *sums = scratch + (kMaxTokens + 1) * layout.steps;
    const int64_t begin = index * task_rows, end = std::min(p.n, begin + task_rows);
    multiply_tokens<C>({static_cast<const uint8_t *>(p.b.data), p.b.row_bytes, begin, end}, x, scratch, sums);
    p.finish(0, static_cast<int>(p.m), begin, static_cast<int>(end - begin), sums, kTaskRows);
  });
}

int32_t run(const sg_call *call) {
  LinearProblem p;
  const bool known = read_linear<LinearOp::forward>(call, &p) &&
                     Formats::with(p.b.dtype, [&](auto tag) { run_on<decltype(tag)::value>(call, p); });
  return known ? SG_OK : fail(call, "linear: operands changed since the kernel was chosen");
}

constexpr sg_kernel linear{sizeof(sg_kernel), "linear", "cpu", SG_ISA_NAME "_bf16_few",
                           SG_TRAIT_DETERMINISTIC | SG_TRAIT_IN_PLACE, 3, supports, workspace, nullptr, nullptr, run};
SG_REGISTER_KERNEL(linear);

}  // namespace
}  // namespace sg::cpu::SG_ISA

#endif

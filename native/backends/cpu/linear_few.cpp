// linear for one to eight tokens: what decoding does. The weight is read once, in place, and each vector of it is
// multiplied with every token while it is in a register. A token's sums are formed in the same order whatever the
// number of tokens, so a sequence decodes to the same bits alone and in a batch.
#include "linear.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kMaxTokens = 8;
constexpr int64_t kMaxBlocks = 2048;  // scales converted at a time, of one row
constexpr int64_t kAhead = 4096;      // bytes between what is multiplied and what is fetched

// A Reader turns a row of blocks into vectors. `scales` converts the f16 fields of `count` blocks to kScales floats
// each; `block` calls put(j, v): v holds the weights that belong to vector j of the block's activations.
template <int32_t dtype>
struct BlockReader {
  using F = Format<dtype>;
  static constexpr int kElements = F::kElements, kBytes = F::kBytes, kScales = 0, kRows = 1;
  static constexpr bool kShuffled = false;
  static void scales(const uint8_t *, int64_t, float *) {}
  template <class Put>
  static void block(const uint8_t *p, const float *, Put &&put) {
    F::decode(p, [&](int offset, vf v) { put(offset / kLanes, v); });
  }
};

template <class T>
struct PlainReader {
  static constexpr int kElements = 2 * kLanes, kBytes = kElements * static_cast<int>(sizeof(T)), kScales = 0, kRows = 2;
  static constexpr bool kShuffled = false;
  static void scales(const uint8_t *, int64_t, float *) {}
  template <class Put>
  static void block(const uint8_t *p, const float *, Put &&put) {
    const T *w = reinterpret_cast<const T *>(p);
    put(0, vload(w));
    put(1, vload(w + kLanes));
  }
};
struct half {
  uint16_t bits;
};
inline vf vload(const half *p) { return vload_half(reinterpret_cast<const uint8_t *>(p)); }
using SG_ISA::vload;

#if defined(__AVX512F__)
// Four f16 at p, of which the first one or two are a block's scales.
inline __m128 load_scales(const uint8_t *p) {
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
}

// 4-bit codes by a table of the block's sixteen values. The 16 bytes are repeated in the four lanes, and each lane
// shifts another nibble to the bottom of its 32-bit elements, where the table lookup takes four bits; the activations
// are put in that order beforehand.
template <bool has_minimum, int offset, int bytes>
struct NibbleReader {
  static constexpr int kElements = 32, kBytes = bytes, kScales = 2, kRows = 4;
  static constexpr bool kShuffled = true;
  static void scales(const uint8_t *p, int64_t count, float *out) {
    for (int64_t i = 0; i < count; ++i, p += kBytes, out += kScales) {
      _mm_storel_pi(reinterpret_cast<__m64 *>(out), load_scales(p));
    }
  }
  template <class Put>
  static void block(const uint8_t *p, const float *scale, Put &&put) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + (has_minimum ? 4 : 2)));
    const __m512i all = _mm512_broadcast_i32x4(codes);
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(16));
    const vf steps = vto_float(_mm512_sub_epi32(viota(), vset_int(offset)));
    const vf values = has_minimum ? vfma(steps, vset(scale[0]), vset(scale[1])) : vmul(steps, vset(scale[0]));
    put(0, _mm512_permutexvar_ps(_mm512_srlv_epi32(all, first), values));
    put(1, _mm512_permutexvar_ps(_mm512_srlv_epi32(all, second), values));
  }
};
template <>
struct BlockReader<SG_Q4_0> : NibbleReader<false, 8, 18> {};
template <>
struct BlockReader<SG_Q4_1> : NibbleReader<true, 0, 20> {};

template <>
struct BlockReader<SG_Q8_0> {
  static constexpr int kElements = 32, kBytes = 34, kScales = 1, kRows = 4;
  static constexpr bool kShuffled = false;
  static void scales(const uint8_t *p, int64_t count, float *out) {
    for (int64_t i = 0; i < count; ++i, p += kBytes) _mm_store_ss(out + i, load_scales(p));
  }
  template <class Put>
  static void block(const uint8_t *p, const float *scale, Put &&put) {
    const vf d = vset(*scale);
    put(0, vmul(vto_float(vload_i8(p + 2)), d));
    put(1, vmul(vto_float(vload_i8(p + 2 + kLanes)), d));
  }
};
#endif

// Element of a block of 32 that position i of the shuffled order holds (NibbleReader): nibble n of 32-bit word w.
inline int shuffled_element(int i) {
  const int vector = i / 16, nibble = vector * 4 + i % 16 / 4, word = i % 4;
  return nibble % 2 * 16 + word * 4 + nibble / 2;
}

struct Few {
  int64_t rows, width, padded;  // of the weight; activations are padded with zeros to whole blocks
  int tokens;                   // 1, 2, 4 or 8: those that are missing are zero
  const uint8_t *weight;
  int64_t row_bytes;
  int32_t dtype;
  const float *x;  // [tokens][padded]
};

// sums[token][row] of kRows rows, side by side so that their chains of additions overlap.
template <class Reader, int kRows, int kTokens>
void multiply_rows(const Few &few, int64_t row, float *scales, float *sums, int64_t sums_stride) {
  vf c[kRows][kTokens][2];
  for (auto &of_row : c) {
    for (auto &of_token : of_row) of_token[0] = of_token[1] = vzero();
  }
  const uint8_t *p[kRows];
  for (int r = 0; r < kRows; ++r) p[r] = few.weight + (row + r) * few.row_bytes;
  // The next rows are asked for early: a row is too short for the hardware to see where the reading goes.
  for (int64_t byte = 0; byte < kRows * few.row_bytes; byte += 64) {
    _mm_prefetch(reinterpret_cast<const char *>(p[0]) + kAhead + byte, _MM_HINT_T0);
  }
  constexpr int kScales = Reader::kScales;
  const int64_t blocks = few.width / Reader::kElements, scale_stride = std::min(kMaxBlocks, blocks) * kScales;
  const float *x = few.x;
  for (int64_t first = 0; first < blocks; first += kMaxBlocks) {
    const int64_t count = std::min(kMaxBlocks, blocks - first);
    for (int r = 0; r < kRows; ++r) Reader::scales(p[r], count, scales + r * scale_stride);
    for (int64_t i = 0; i < count; ++i, x += Reader::kElements) {
      for (int r = 0; r < kRows; ++r) {
        Reader::block(p[r], scales + r * scale_stride + i * kScales, [&](int j, vf w) {
          for (int t = 0; t < kTokens; ++t)
            c[r][t][j & 1] = vfma(w, vload(x + t * few.padded + j * kLanes), c[r][t][j & 1]);
        });
        p[r] += Reader::kBytes;
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    if (const int64_t rest = few.width - blocks * Reader::kElements; rest > 0) {  // plain dtypes only
      float tail[2 * kLanes] = {};
      decode_row(few.dtype, p[r], rest, tail);
      for (int t = 0; t < kTokens; ++t) {
        for (int j = 0; j < 2; ++j) {
          c[r][t][j] = vfma(vload(tail + j * kLanes), vload(x + t * few.padded + j * kLanes), c[r][t][j]);
        }
      }
    }
    for (int t = 0; t < kTokens; ++t) sums[t * sums_stride + r] = vsum(vadd(c[r][t][0], c[r][t][1]));
  }
}

template <class Reader, int kTokens>
void multiply_task(const Few &few, int64_t begin, int64_t end, float *scales, float *sums, int64_t sums_stride) {
  constexpr int kRows = std::max(1, Reader::kRows / kTokens);
  int64_t row = begin;
  for (; row + kRows <= end; row += kRows) {
    multiply_rows<Reader, kRows, kTokens>(few, row, scales, sums + (row - begin), sums_stride);
  }
  for (; row < end; ++row) multiply_rows<Reader, 1, kTokens>(few, row, scales, sums + (row - begin), sums_stride);
}

template <class Reader>
void multiply(const Few &few, int64_t begin, int64_t end, float *scales, float *sums, int64_t sums_stride) {
  switch (few.tokens) {
    case 1: return multiply_task<Reader, 1>(few, begin, end, scales, sums, sums_stride);
    case 2: return multiply_task<Reader, 2>(few, begin, end, scales, sums, sums_stride);
    case 4: return multiply_task<Reader, 4>(few, begin, end, scales, sums, sums_stride);
    default: return multiply_task<Reader, 8>(few, begin, end, scales, sums, sums_stride);
  }
}

using MultiplyFn = void (*)(const Few &, int64_t, int64_t, float *, float *, int64_t);
MultiplyFn multiply_for(int32_t dtype, bool *shuffled) {
  MultiplyFn result = nullptr;
  *shuffled = false;
  with_format(dtype, [&](auto tag) {
    using Reader = BlockReader<decltype(tag)::value>;
    result = multiply<Reader>;
    *shuffled = Reader::kShuffled;
  });
  if (dtype == SG_F32) return multiply<PlainReader<float>>;
  if (dtype == SG_BF16) return multiply<PlainReader<bf16>>;
  if (dtype == SG_F16) return multiply<PlainReader<half>>;
  return result;
}

constexpr int64_t kTaskRows = 128;  // the most rows of a task
constexpr int64_t kScaleFloats = 4 * 2 * kMaxBlocks, kSumFloats = kMaxTokens * kTaskRows;
constexpr int64_t kWorkerFloats = kScaleFloats + kSumFloats;

int64_t padded_width(int64_t width) { return round_up(width, 32); }

int32_t supports(const sg_call *call) {
  LinearProblem p;
  if (!read_linear<LinearOp::forward>(call, &p) || p.m < 1 || p.m > kMaxTokens) return 0;
  return isa_score(SG_ISA_NAME) > 0 ? isa_score(SG_ISA_NAME) + 40 : 0;
}

size_t workspace(const sg_call *call) {
  const int64_t width = input(call, 0)->shape[1];
  return static_cast<size_t>(kMaxTokens * padded_width(width) + kWorkerFloats * num_workers(call)) * sizeof(float);
}

void copy_activations(const LinearProblem &p, const Few &few, bool shuffled, float *x) {
  std::fill(x, x + few.tokens * few.padded, 0.0f);
  for (int64_t t = 0; t < p.m; ++t) {
    float *row = x + t * few.padded;
    decode_row(p.a.dtype, static_cast<const char *>(p.a.data) + t * SG_ISA::row_bytes(p.a.dtype, p.a.stride), p.k,
               row);
    if (!shuffled) continue;
    for (int64_t block = 0; block < p.k; block += 32) {
      float ordered[32];
      for (int i = 0; i < 32; ++i) ordered[i] = row[block + shuffled_element(i)];
      std::memcpy(row + block, ordered, sizeof(ordered));
    }
  }
}

int32_t run(const sg_call *call) {
  LinearProblem p;
  if (!read_linear<LinearOp::forward>(call, &p))
    return fail(call, "linear: operands changed since the kernel was chosen");
  bool shuffled = false;
  const MultiplyFn multiply_fn = multiply_for(p.b.dtype, &shuffled);
  float *x = static_cast<float *>(call->workspace);
  const int tokens = p.m <= 2 ? static_cast<int>(p.m) : p.m <= 4 ? 4 : 8;
  const Few few{p.n,       p.k, padded_width(p.k), tokens, static_cast<const uint8_t *>(p.b.data), p.b.row_bytes,
                p.b.dtype, x};
  copy_activations(p, few, shuffled, x);
  float *workers = x + kMaxTokens * few.padded;
  const int64_t task_rows = p.n >= 4096 ? kTaskRows : 32;
  parallel_for(call, (p.n + task_rows - 1) / task_rows, [&](int64_t task, int worker) {
    float *scales = workers + worker * kWorkerFloats, *sums = scales + kScaleFloats;
    const int64_t begin = task * task_rows, end = std::min(p.n, begin + task_rows);
    multiply_fn(few, begin, end, scales, sums, task_rows);
    p.finish(0, static_cast<int>(p.m), begin, static_cast<int>(end - begin), sums, task_rows);
  });
  return SG_OK;
}

constexpr sg_kernel linear{sizeof(sg_kernel), "linear", "cpu", SG_ISA_NAME "_few",
                           SG_TRAIT_DETERMINISTIC | SG_TRAIT_IN_PLACE, 3, supports, workspace, nullptr, nullptr, run};
SG_REGISTER_KERNEL(linear);

}  // namespace
}  // namespace sg::cpu::SG_ISA

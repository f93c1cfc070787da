// linear for one to sixteen bf16 tokens on weights of 8-bit codes or in blocks of 256, on AMX's integer tiles. As in
// linear_few_codes.cpp the codes are multiplied as integers by tokens in fixed point of 15 bits, whose upper and lower
// digits are signed bytes: a tile holds the codes of one unit (a stretch of K with one scale) of 16 rows, another one the
// digits of eight tokens, eight columns of upper and eight of lower ones. One instruction gives all their sums, exactly;
// what is left for the vectors is to unpack a code once, whatever the number of tokens, and to scale 16 sums at a time.
// Rows of 8-bit codes are read where they lie.
//
// Floor: the bytes of the weight once. A block of 32 costs about six vector operations for eight tokens, of which four
// are for each eight tokens more, and an eighth of what the tiles could multiply.
//
// A column's sums run over K in one order: a token's bits don't depend on the other tokens, nor on how many there are,
// as long as this kernel runs.
#include "amx_tiles.h"
#include "fixed_point.h"
#include "linear.h"
#include "wide_blocks.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kMaxTokens = 16, kTokens = 8;  // of a call; of a tile
constexpr int64_t kRows = 16;                    // of weights in a tile
constexpr int64_t kSpan = 768;                   // elements of K that are unpacked at a time: whole blocks
constexpr int64_t kCodeStride = kSpan + 64;      // bytes from row to row of unpacked codes
constexpr int64_t kMaxUnits = kSpan / 16;        // of a span
constexpr int64_t kTaskRows = 128;               // the most rows of a task
constexpr int64_t kStretch = 128;                // elements of K whose tokens have one step

// Codes and scales of 16 rows over one span of K.
struct Span {
  alignas(64) uint8_t codes[kRows * kCodeStride];
  alignas(64) float scales[kRows * kMaxUnits];   // [row][unit]
  alignas(64) float offsets[kRows * kMaxUnits];  // what is added to every value of a unit
};

// Eight tokens over one unit of K.
template <int kUnit>
struct TokenUnit {
  int32_t digits[kUnit / 4][2 * kTokens];  // four consecutive k; upper digits of each token, then the lower
  float steps[2 * kTokens];                // what a digit of the column counts for, the same in a stretch of kStretch
  float sums[2 * kTokens];                 // of each token in upper digits, under those; zero under the lower ones
};

struct Tiles {
  const uint8_t *first;  // codes of the span's first unit and row
  int64_t unit_bytes, row_bytes;
};

// A Reader has the elements of a unit, whether codes are signed and whether a unit has an offset, how far apart in a span the
// scales of rows and of units are, `tiles`, which says where codes will be, and `read`: codes and scales of `count` elements
// of 16 rows from `rows` on, one of `steps` at a time. Codes lie in the order of the elements.

// The formats of 256 elements. Inner: its bytes, units and `read_block`, which unpacks one block of a row.
template <class Inner>
struct WideReader : Inner {
  static constexpr int64_t kScaleRow = kMaxUnits, kScaleUnit = 1;
  static Tiles tiles(const uint8_t *, int64_t, const Span *span) { return {span->codes, Inner::kUnit, kCodeStride}; }
  static int64_t steps(int64_t) { return kRows; }
  static void read(const uint8_t *rows, int64_t row_bytes, int64_t count, int64_t row, Span *span) {
    const uint8_t *block = rows + row * row_bytes;
    for (int64_t k = 0; k < count; k += 256, block += Inner::kBytes) {
      const int64_t unit = row * kMaxUnits + k / Inner::kUnit;
      Inner::read_block(block, span->codes + row * kCodeStride + k, span->scales + unit, span->offsets + unit);
    }
  }
};

inline __m512i halves(int low, int high) {
  return _mm512_inserti64x4(_mm512_set1_epi32(low), _mm256_set1_epi32(high), 1);
}

// Eight sub-blocks of 32: scales and minimums of six bits, packed as quant.h's unpack_scale says.
template <bool has_high>
struct SixBitScales {
  static constexpr int kUnit = 32, kBytes = has_high ? 176 : 144;
  static constexpr bool kSigned = false, kHasOffset = true;
  static void read_block(const uint8_t *block, uint8_t *codes, float *scales, float *offsets) {
    for (int pair = 0; pair < 4; ++pair) {
      const __m512i bytes = twice(block + (has_high ? 48 : 16) + 32 * pair);
      __m512i code = _mm512_and_si512(_mm512_srlv_epi32(bytes, halves(0, 4)), _mm512_set1_epi8(15));
      if constexpr (has_high) {
        const __m512i bit = halves(0x01010101 << (2 * pair), static_cast<int>(0x02020202u << (2 * pair)));
        code = _mm512_mask_add_epi8(code, _mm512_test_epi8_mask(twice(block + 16), bit), code, _mm512_set1_epi8(16));
      }
      _mm512_store_si512(codes + 64 * pair, code);
    }
    read_six_bit_scales(block, scales, offsets);
  }
};

// Sixteen sub-blocks of 16 with scales of eight bits.
struct EightBitScales {
  static constexpr int kUnit = 16, kBytes = 210;
  static constexpr bool kSigned = true, kHasOffset = false;
  static void read_block(const uint8_t *block, uint8_t *codes, float *scales, float *) {
    for (int half = 0; half < 2; ++half) {
      const __m512i nibbles = _mm512_loadu_si512(block + 64 * half), pairs = twice(block + 128 + 32 * half);
      for (int side = 0; side < 2; ++side) {  // elements 0 to 63 of the half, and the others
        const __m512i low = _mm512_and_si512(_mm512_srli_epi32(nibbles, side * 4), _mm512_set1_epi8(15));
        const __m512i shifted = _mm512_srlv_epi32(pairs, halves(4 * side, 4 * side + 2));
        const __m512i high = _mm512_slli_epi32(_mm512_and_si512(shifted, _mm512_set1_epi8(3)), 4);
        const __m512i code = _mm512_sub_epi8(_mm512_or_si512(low, high), _mm512_set1_epi8(32));
        _mm512_store_si512(codes + 128 * half + 64 * side, code);
      }
    }
    vstore(scales, vmul(vto_float(vload_i8(block + 192)), vset(load_half(block + 208))));
  }
};

template <int32_t dtype>
struct Reader;  // those that linear_codes_amx.cpp has are not here
template <>
struct Reader<SG_Q4_K> : WideReader<SixBitScales<false>> {};
template <>
struct Reader<SG_Q5_K> : WideReader<SixBitScales<true>> {};
template <>
struct Reader<SG_Q6_K> : WideReader<EightBitScales> {};
template <>
struct Reader<SG_Q8_0> {
  static constexpr int kUnit = 32, kBytes = 34;
  static constexpr bool kSigned = true, kHasOffset = false;
  static constexpr int64_t kScaleRow = 1, kScaleUnit = kRows;
  static Tiles tiles(const uint8_t *rows, int64_t row_bytes, const Span *) { return {rows + 2, kBytes, row_bytes}; }
  // Scales are copied one by one, which leaves the vectors' ports alone, and read as vectors two steps later, when they have
  // reached the cache. A unit at a time: all at once would fill the processor's queue, and the tiles wait behind them.
  static constexpr int64_t kLater = 2;
  static int64_t steps(int64_t count) { return count / kUnit + kLater; }
  static void read(const uint8_t *rows, int64_t row_bytes, int64_t count, int64_t step, Span *span) {
    uint8_t *fields = span->codes;  // where no codes are: [unit][row] of two bytes
    if (step * kUnit < count) {
      const uint8_t *p = rows + step * kBytes;
#pragma GCC unroll 16
      for (int64_t r = 0; r < kRows; ++r) std::memcpy(fields + (step * kRows + r) * 2, p + r * row_bytes, 2);
    }
    if (step >= kLater) vstore(span->scales + (step - kLater) * kRows, vload_half(fields + (step - kLater) * kRows * 2));
  }
};

// The reading of one span.
template <class R>
struct Reading {
  const uint8_t *rows;
  int64_t row_bytes, count;
  Span *span;
  int64_t steps, done;

  void step() {
    if (done < steps) R::read(rows, row_bytes, count, done++, span);
  }
  void finish() {
    while (done < steps) step();
    __asm__ volatile("" ::: "memory");  // tile loads don't tell the compiler what they read
  }
};

// Tile registers 0 and 1: sums; 2 and 3: codes; 4 and 5: digits.
template <int kUnit>
TileShapes few_shapes() {
  TileShapes shapes;
  shapes.row_bytes[2] = shapes.row_bytes[3] = kUnit;
  shapes.rows[4] = shapes.rows[5] = kUnit / 4;
  return shapes;
}

template <bool is_signed>
inline void multiply_even(const uint8_t *codes, int64_t row_bytes, const void *digits, int32_t *sums) {
  _tile_zero(0);
  _tile_loadd(2, codes, row_bytes);
  _tile_loadd(4, digits, 64);
  if constexpr (is_signed) _tile_dpbssd(0, 2, 4);
  else _tile_dpbusd(0, 2, 4);
  _tile_stored(0, sums, 64);
}
template <bool is_signed>
inline void multiply_odd(const uint8_t *codes, int64_t row_bytes, const void *digits, int32_t *sums) {
  _tile_zero(1);
  _tile_loadd(3, codes, row_bytes);
  _tile_loadd(5, digits, 64);
  if constexpr (is_signed) _tile_dpbssd(1, 3, 5);
  else _tile_dpbusd(1, 3, 5);
  _tile_stored(1, sums, 64);
}

// parts[row][column] += a unit's sums, scaled, in steps of the tokens.
template <class R>
inline void add_unit(vf (&parts)[kRows], const int32_t *sums, const TokenUnit<R::kUnit> &x, const float *scales,
                     const float *offsets) {
  const vf token_sums = vload(x.sums);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    parts[r] = vfma(vto_float(_mm512_load_si512(sums + r * 2 * kTokens)), vset(scales[r * R::kScaleRow]), parts[r]);
    if constexpr (R::kHasOffset) parts[r] = vfma(token_sums, vset(offsets[r * R::kScaleRow]), parts[r]);
  }
}

// totals[row][column] += what a stretch gave, which begins anew.
inline void end_stretch(vf (&parts)[kRows], const float *steps, float *totals) {
  const vf step = vload(steps);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    vstore(totals + r * 2 * kTokens, vfma(parts[r], step, vload(totals + r * 2 * kTokens)));
    parts[r] = vzero();
  }
}

// Units between the tiles and the scaling of their sums: as long as a product's way through memory takes.
constexpr int64_t kLead = 3, kRing = 4;

// Adds the products of a span of `units` with eight tokens, and reads the next one meanwhile.
template <class R>
void multiply_span(const Tiles &tiles, const Span &span, int64_t units, const TokenUnit<R::kUnit> *x, float *of_rows,
                   Reading<R> *next, FetchAhead *ahead) {
  constexpr int64_t kSquare = kRows * 2 * kTokens;
  alignas(64) int32_t sums[kRing * kSquare];
  vf parts[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) parts[r] = vzero();
  const auto multiply = [&](int64_t u) {
    const uint8_t *codes = tiles.first + u * tiles.unit_bytes;
    if (u % 2 == 0) multiply_even<R::kSigned>(codes, tiles.row_bytes, x[u].digits, sums + u % kRing * kSquare);
    else multiply_odd<R::kSigned>(codes, tiles.row_bytes, x[u].digits, sums + u % kRing * kSquare);
  };
  for (int64_t u = 0; u < std::min(kLead, units); ++u) multiply(u);
  for (int64_t u = 0; u < units; ++u) {
    if (u + kLead < units) multiply(u + kLead);
    if (ahead != nullptr) ahead->step();
    next->step();
    add_unit<R>(parts, sums + u % kRing * kSquare, x[u], span.scales + u * R::kScaleUnit,
                span.offsets + u * R::kScaleUnit);
    if ((u + 1) % (kStretch / R::kUnit) == 0 || u + 1 == units) end_stretch(parts, x[u].steps, of_rows);
  }
}

// out[token][0 .. 16) of 16 rows, from each row's upper and lower totals.
inline void store_rows(const float *of_rows, float *out, int64_t stride) {
  alignas(64) float turned[kRows * 2 * kTokens];
  transpose_square(of_rows, 2 * kTokens, turned, kRows);
  for (int64_t t = 0; t < kTokens; ++t) {
    vstore(out + t * stride, vadd(vload(turned + t * kRows), vload(turned + (kTokens + t) * kRows)));
  }
}

struct Task {
  const uint8_t *weight;
  int64_t row_bytes, width, begin, end;  // rows [begin, end)
};

// The totals of 16 rows from `start` on, to sums[token][row - task.begin]; those before `row` are there already.
inline void put_rows(const Task &task, int64_t start, int64_t row, const float *totals, float *sums) {
  if (start == row) return store_rows(totals, sums + row - task.begin, kTaskRows);
  alignas(64) float all[kTokens * kRows];
  store_rows(totals, all, kRows);
  for (int64_t t = 0; t < kTokens; ++t) {
    std::copy(all + t * kRows + row - start, all + (t + 1) * kRows, sums + t * kTaskRows + row - task.begin);
  }
}

// sums[token][row - begin] of a task, for `groups` times eight tokens; x: [group][units of a row]. A span is read while the
// one before it is multiplied: tiles wait long for what was just written.
template <int32_t dtype>
void multiply_task(const Task &task, const TokenUnit<Reader<dtype>::kUnit> *x, int64_t groups, Span *spans,
                   float *sums) {
  using R = Reader<dtype>;
  alignas(64) float totals[2][kRows * 2 * kTokens];
  Tiles tiles[2];
  const int64_t row_units = task.width / R::kUnit, row_spans = (task.width + kSpan - 1) / kSpan;
  const int64_t steps = (task.end - task.begin + kRows - 1) / kRows * row_spans;
  const auto row_of = [&](int64_t step) { return task.begin + step / row_spans * kRows; };
  // The last rows may be computed again, never past the end.
  const auto start_of = [&](int64_t step) { return std::min(row_of(step), task.end - kRows); };
  const auto elements = [&](int64_t k) { return std::min(kSpan, task.width - k); };
  const auto reading = [&](int64_t step) -> Reading<R> {
    if (step >= steps) return {};
    const int64_t k = step % row_spans * kSpan, count = elements(k);
    const uint8_t *rows = task.weight + start_of(step) * task.row_bytes + SG_ISA::row_bytes(dtype, k);
    tiles[step % 2] = R::tiles(rows, task.row_bytes, spans + step % 2);
    return {rows, task.row_bytes, count, spans + step % 2, R::steps(count), 0};
  };
  FetchAhead ahead(task.weight, kRows * task.row_bytes, row_units);
  reading(0).finish();
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t k = step % row_spans * kSpan;
    Reading<R> next = reading(step + 1);
    if (k == 0) {
      ahead = FetchAhead(task.weight + start_of(step) * task.row_bytes, kRows * task.row_bytes, row_units);
      std::fill(totals[0], totals[0] + 2 * kRows * 2 * kTokens, 0.0f);
    }
    for (int64_t g = 0; g < groups; ++g) {
      const TokenUnit<R::kUnit> *units = x + g * row_units + k / R::kUnit;
      multiply_span<R>(tiles[step % 2], spans[step % 2], elements(k) / R::kUnit, units, totals[g], &next,
                       g == 0 ? &ahead : nullptr);
      if (k + kSpan < task.width) continue;
      put_rows(task, start_of(step), row_of(step), totals[g], sums + g * kTokens * kTaskRows);
    }
    next.finish();
  }
}

// rows[t] of 32-bit elements (half h, k) become rows[k] of elements (half h, t): an 8 x 8 square in each half.
inline void transpose_halves(__m512i (&rows)[kTokens]) {
  __m512i pairs[8], fours[8];
  for (int t = 0; t < 8; t += 2) {
    pairs[t] = _mm512_unpacklo_epi32(rows[t], rows[t + 1]);
    pairs[t + 1] = _mm512_unpackhi_epi32(rows[t], rows[t + 1]);
  }
  for (int t = 0; t < 8; t += 4) {  // fours[t + j]: k = j and, in the other lane of its half, k = 4 + j
    fours[t] = _mm512_unpacklo_epi64(pairs[t], pairs[t + 2]);
    fours[t + 1] = _mm512_unpackhi_epi64(pairs[t], pairs[t + 2]);
    fours[t + 2] = _mm512_unpacklo_epi64(pairs[t + 1], pairs[t + 3]);
    fours[t + 3] = _mm512_unpackhi_epi64(pairs[t + 1], pairs[t + 3]);
  }
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm512_permutex2var_epi64(fours[j], low, fours[4 + j]);
    rows[4 + j] = _mm512_permutex2var_epi64(fours[j], high, fours[4 + j]);
  }
}

// All units of the tokens [first, first + 8) of the call; those past the last one are zero.
template <int kUnit>
void read_tokens(const LinearProblem &p, int64_t first, TokenUnit<kUnit> *out) {
  const int count = static_cast<int>(std::min(kTokens, p.m - first));
  alignas(64) float factors[kTokens] = {}, steps[kTokens] = {}, sums[kTokens] = {};
  for (int64_t k = 0; k < p.k; k += kUnit, ++out) {
    const bf16 *x = static_cast<const bf16 *>(p.a.data) + first * p.a.stride + k;
    for (int t = 0; k % kStretch == 0 && t < count; ++t) {
      const FixedStep fixed = fixed_step(x + t * p.a.stride, std::min(kStretch, p.k - k));
      factors[t] = fixed.factor, steps[t] = fixed.step;
    }
    __m512i rows[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      if (t < count) rows[t] = to_digits(to_fixed_point<kUnit>(x + t * p.a.stride, factors[t], sums + t));
      else rows[t] = _mm512_setzero_si512();
    }
    transpose_halves(rows);
#pragma GCC unroll 8
    for (int i = 0; i < kUnit / 4; ++i) _mm512_storeu_si512(out->digits[i], rows[i]);
    const __m256 step = _mm256_load_ps(steps);
    _mm256_storeu_ps(out->steps, _mm256_mul_ps(step, _mm256_set1_ps(256.0f)));
    _mm256_storeu_ps(out->steps + kTokens, step);
    _mm256_storeu_ps(out->sums, _mm256_mul_ps(_mm256_load_ps(sums), _mm256_set1_ps(1.0f / 256.0f)));
    _mm256_storeu_ps(out->sums + kTokens, _mm256_setzero_ps());
  }
}

// Bytes of workspace: the tokens, then for each worker two spans and a task's sums.
constexpr int64_t kWorkerBytes = 2 * static_cast<int64_t>(sizeof(Span)) + kMaxTokens * kTaskRows * 4;

int64_t token_bytes(int64_t tokens, int64_t width) {
  static_assert(sizeof(TokenUnit<16>) * 2 >= sizeof(TokenUnit<32>));
  return (tokens + kTokens - 1) / kTokens * (width / 16) * static_cast<int64_t>(sizeof(TokenUnit<16>));
}

using Formats = FormatList<SG_Q8_0, SG_Q4_K, SG_Q5_K, SG_Q6_K>;

int32_t supports(const sg_call *call) {
  LinearProblem p;
  if (!cpu_features().amx_int8 || !read_linear<LinearOp::forward>(call, &p)) return 0;
  if (p.m < 1 || p.m > kMaxTokens || p.n < kRows || p.k < 32 || p.a.dtype != SG_BF16) return 0;
  if (!Formats::has(p.b.dtype)) return 0;
  // One or two tokens are multiplied faster by the dot products of linear_few_codes.cpp, where it has the format.
  return p.b.dtype == SG_Q8_0 && p.m <= 2 ? 60 : 70;
}

size_t workspace(const sg_call *call) {
  const sg_tensor *x = input(call, 0);
  return static_cast<size_t>(token_bytes(x->shape[0], x->shape[1]) + kWorkerBytes * num_workers(call));
}

template <int32_t dtype>
void run_on(const sg_call *call, const LinearProblem &p) {
  constexpr int kUnit = Reader<dtype>::kUnit;
  char *workers = static_cast<char *>(call->workspace) + token_bytes(p.m, p.k);
  auto *x = static_cast<TokenUnit<kUnit> *>(call->workspace);
  const int64_t units = p.k / kUnit, groups = (p.m + kTokens - 1) / kTokens;
  for (int64_t g = 0; g < groups; ++g) read_tokens<kUnit>(p, g * kTokens, x + g * units);
  const int64_t task_rows = p.n >= 4096 ? kTaskRows : 32;
  parallel_for(call, (p.n + task_rows - 1) / task_rows, [&](int64_t index, int worker) {
    auto *spans = reinterpret_cast<Span *>(workers + worker * kWorkerBytes);
    float *sums = reinterpret_cast<float *>(spans + 2);
    const int64_t begin = index * task_rows, end = std::min(p.n, begin + task_rows);
    const TileSession session(few_shapes<kUnit>());
    const Task task{static_cast<const uint8_t *>(p.b.data), p.b.row_bytes, p.k, begin, end};
    multiply_task<dtype>(task, x, groups, spans, sums);
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

// linear for one to eight bf16 tokens on weights of 4- and 5-bit codes, on AMX's bf16 tiles. The codes are multiplied as small
// whole numbers, and a block's sum is scaled instead of its values: a tile holds the codes of one block of 16 rows, another
// one the same 32 elements of the tokens, where they lie, and the square of their products is scaled and added by
// vectors whose lanes are the rows.
//
// What the tiles want is a column for each row, so blocks are turned: 16 rows of four words of codes become four vectors,
// whose lanes are rows. Where a block has no minimum a look into a table of 32 makes bf16 numbers of 32 codes, and minds no
// bits above them. Where it has one, a code c becomes the number 128 + c, whose bits are those of 128 with the code in the
// lowest; the 128 too much times the sum of the token's elements is taken back with the minimum.
//
// Floor: the bytes of the weight once. A block of 16 rows costs 60 to 90 vector operations to unpack, whatever the number of
// tokens, one or two for each token, and 32 cycles of the tiles: as long to put sums away as to multiply.
//
// A token's sums run over K in one order: its bits don't depend on the other tokens, nor on how many there are, as long
// as this kernel runs.
#include <array>

#include "amx_tiles.h"
#include "linear.h"
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kTokens = 8;                    // of a call at most: linear_tables_amx.cpp is faster from there on
constexpr int64_t kRows = 16;                     // of weights in a tile
constexpr int64_t kUnit = 32;                     // elements of a block
constexpr int64_t kSpanUnits = 8;                 // blocks of a row unpacked at a time: 8 KiB of the first-level cache
constexpr int64_t kTaskRows = 128;                // the most rows of a task
constexpr int64_t kTileWords = 16 * 16;

// Codes and scales of 16 rows over a span of K.
struct Span {
  alignas(64) uint32_t codes[kSpanUnits][kTileWords];  // [pair of elements][row], two bf16 each
  alignas(64) float scales[kSpanUnits][kRows];
  alignas(64) float offsets[kSpanUnits][kRows];  // what is added to every value of a block, where a block has that
};

struct Tokens {
  const bf16 *data;
  int64_t stride, count;  // elements from token to token
  float *sums;            // [token][sums_stride]: of each block's elements
  int64_t sums_stride;

  int64_t row_bytes() const { return stride * static_cast<int64_t>(sizeof(bf16)); }
};

// words[j], lane r: word j of the 16 bytes at p of row r, in each of which the two middle bytes have changed places: so
// consecutive elements are 16 bits apart.
SG_FLATTEN inline void turn_rows(const uint8_t *p, int64_t row_bytes, __m512i (&words)[4]) {
  const __m512i middle = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  const auto row = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + r * row_bytes)); };
  __m512i z[4], pairs[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    z[i] = _mm512_castsi128_si512(row(i));
    z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x00f0, row(4 + i));
    z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x0f00, row(8 + i));
    z[i] = _mm512_mask_broadcast_i32x4(z[i], 0xf000, row(12 + i));
    z[i] = _mm512_shuffle_epi8(z[i], middle);
  }
  pairs[0] = _mm512_unpacklo_epi32(z[0], z[1]), pairs[1] = _mm512_unpackhi_epi32(z[0], z[1]);
  pairs[2] = _mm512_unpacklo_epi32(z[2], z[3]), pairs[3] = _mm512_unpackhi_epi32(z[2], z[3]);
  words[0] = _mm512_unpacklo_epi64(pairs[0], pairs[2]), words[1] = _mm512_unpackhi_epi64(pairs[0], pairs[2]);
  words[2] = _mm512_unpacklo_epi64(pairs[1], pairs[3]), words[3] = _mm512_unpackhi_epi64(pairs[1], pairs[3]);
}

// Pair i of a block are its elements 2 i and 2 i + 1: in which word of the turned ones, and how far up in its halves. The
// upper nibbles are the block's second half.
constexpr int pair_word(int i) { return i % 8 / 2; }
constexpr int pair_shift(int i) { return i % 2 * 8 + i / 8 * 4; }

// The fifth bits of a block: bit e of `bits` is element e's. Pair i's first one goes to bit high_bit(i), the second 16 above.
inline __m512i spread_pairs(__m512i bits) {
  constexpr int kXorAnd = 0x28, kXor = 0x96;  // (a ^ b) & c; a ^ b ^ c
  // Bit 2 j + 1 of the lower half and bit 2 j of the upper one change places.
  const __m512i odd = _mm512_set1_epi32(0x0000aaaa);
  const __m512i apart = _mm512_ternarylogic_epi32(_mm512_srli_epi32(bits, 15), bits, odd, kXorAnd);
  return _mm512_ternarylogic_epi32(bits, apart, _mm512_slli_epi32(apart, 15), kXor);
}
// Elements 0 to 15 lie on even bits from 0 on, 16 to 31 on odd ones.
constexpr int high_bit(int i) { return i % 8 * 2 + i / 8; }

// The numbers that codes of four or, where they have the fifth, five bits stand for, before they are scaled.
template <bool has_high>
inline __m512i code_table() {
  alignas(64) static constexpr auto kTable = [] {
    std::array<uint16_t, 32> table{};
    for (int i = 0; i < 32; ++i) {
      const float value = static_cast<float>(has_high ? i - 16 : i % 16 - 8);
      table[static_cast<size_t>(i)] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, value) >> 16);
    }
    return table;
  }();
  return _mm512_load_si512(kTable.data());
}

// A Reader: bytes of a block, and `read`, the block at p of 16 rows.
template <int bytes, bool has_minimum, bool has_high>
struct CodeReader {
  static constexpr bool kHasMinimum = has_minimum;
  static constexpr int kBytes = bytes, kHigh = has_minimum ? 4 : 2, kCodes = kHigh + (has_high ? 4 : 0);
  SG_FLATTEN static void read(const uint8_t *p, int64_t row_bytes, __m512i row_offsets, uint32_t *codes, float *scales,
                              float *offsets) {
    constexpr int kOr = 0xf8, kSelect = 0xe4;  // a | (b & c); a where c, else b
    const __m512i table = code_table<has_high>(), fifth = _mm512_set1_epi32(0x00100010);
    const __m512i nibbles = _mm512_set1_epi32(0x000f000f), base = _mm512_set1_epi32(0x43004300);  // 128, twice
    __m512i words[4], high = _mm512_setzero_si512();
    turn_rows(p + kCodes, row_bytes, words);
    if constexpr (has_high) high = spread_pairs(_mm512_i32gather_epi32(row_offsets, p + kHigh, 1));
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      __m512i code = _mm512_srli_epi32(words[pair_word(i)], static_cast<unsigned>(pair_shift(i)));
      const __m512i bit = has_high ? _mm512_ror_epi32(high, (high_bit(i) + 28) % 32) : high;
      if constexpr (has_minimum) {
        code = _mm512_ternarylogic_epi32(base, code, nibbles, kOr);
        if constexpr (has_high) code = _mm512_ternarylogic_epi32(code, bit, fifth, kOr);
      } else {
        if constexpr (has_high) code = _mm512_ternarylogic_epi32(bit, code, fifth, kSelect);
        code = _mm512_permutexvar_epi16(code, table);
      }
      _mm512_store_si512(codes + 16 * i, code);
    }
    const __m512i headers = _mm512_i32gather_epi32(row_offsets, p, 1);
    const vf d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(headers));
    vstore(scales, d);
    if constexpr (has_minimum) {
      const vf minimum = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(headers, 16)));
      vstore(offsets, vfma(d, vset(-128.0f), minimum));
    }
  }
};

template <int32_t dtype>
struct Reader;
template <>
struct Reader<SG_Q4_0> : CodeReader<18, false, false> {};
template <>
struct Reader<SG_Q4_1> : CodeReader<20, true, false> {};
template <>
struct Reader<SG_Q5_0> : CodeReader<22, false, true> {};
template <>
struct Reader<SG_Q5_1> : CodeReader<24, true, true> {};

// Tile registers 0 and 1: sums; 2 and 3: tokens, of which there are `rows`; 4 and 5: codes.
TileShapes shapes_of(int64_t rows) {
  TileShapes shapes;
  std::fill(shapes.rows, shapes.rows + 4, static_cast<uint8_t>(rows));
  return shapes;
}

inline void multiply_even(const bf16 *x, int64_t x_bytes, const uint32_t *codes, float *products) {
  _tile_zero(0);
  _tile_loadd(2, x, x_bytes);
  _tile_loadd(4, codes, 64);
  _tile_dpbf16ps(0, 2, 4);
  _tile_stored(0, products, 64);
}
inline void multiply_odd(const bf16 *x, int64_t x_bytes, const uint32_t *codes, float *products) {
  _tile_zero(1);
  _tile_loadd(3, x, x_bytes);
  _tile_loadd(5, codes, 64);
  _tile_dpbf16ps(1, 3, 5);
  _tile_stored(1, products, 64);
}

// Units between the tiles and the scaling of their products: as long as these take to come back from memory.
constexpr int64_t kLead = 3, kRing = 4;
using Ring = float[kRing][kTokens * kRows];

// totals[token][row] += the products of a span of `units` from block `first` on.
template <bool has_minimum, int tokens>
void multiply_span(const Span &span, int64_t first, int64_t units, const Tokens &x, Ring &products, float *totals,
                   FetchAhead *ahead) {
  const int64_t x_bytes = x.row_bytes();
  const bf16 *from = x.data + first * kUnit;
  vf sums[tokens];
#pragma GCC unroll 16
  for (int t = 0; t < tokens; ++t) sums[t] = vload(totals + t * kRows);
  const auto multiply = [&](int64_t u) {
    if (u % 2 == 0) multiply_even(from + u * kUnit, x_bytes, span.codes[u], products[u % kRing]);
    else multiply_odd(from + u * kUnit, x_bytes, span.codes[u], products[u % kRing]);
  };
  for (int64_t u = 0; u < std::min(kLead, units); ++u) multiply(u);
  for (int64_t u = 0; u < units; ++u) {
    if (u + kLead < units) multiply(u + kLead);
    ahead->step();
    const vf scale = vload(span.scales[u]);
    const float *product = products[u % kRing];
#pragma GCC unroll 16
    for (int t = 0; t < tokens; ++t) sums[t] = vfma(vload(product + t * kRows), scale, sums[t]);
    if constexpr (has_minimum) {
      const vf offset = vload(span.offsets[u]);
#pragma GCC unroll 16
      for (int t = 0; t < tokens; ++t) sums[t] = vfma(vset(x.sums[t * x.sums_stride + first + u]), offset, sums[t]);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < tokens; ++t) vstore(totals + t * kRows, sums[t]);
}

struct Task {
  const uint8_t *weight;
  int64_t row_bytes, units, begin, end;  // units: of a row; rows [begin, end)
};

// What a worker works in. Rows of products that no token has stay zero.
struct Scratch {
  Span span;
  alignas(64) Ring products;
  alignas(64) float totals[kTokens * kRows];
  alignas(64) float sums[kTokens * kTaskRows];
};

// scratch->sums[token][row - begin] of a task.
template <int32_t dtype, int tokens>
void multiply_task(const Task &task, const Tokens &x, Scratch *scratch) {
  using R = Reader<dtype>;
  const TileSession session(shapes_of(x.count));
  Span &span = scratch->span;
  const __m512i row_offsets = _mm512_mullo_epi32(viota(), vset_int(static_cast<int32_t>(task.row_bytes)));
  std::memset(scratch->products, 0, sizeof(scratch->products));
  for (int64_t row = task.begin; row < task.end; row += kRows) {
    const int64_t start = std::min(row, task.end - kRows);  // the last rows may be computed again, never past the end
    const uint8_t *rows = task.weight + start * task.row_bytes;
    FetchAhead ahead(rows, kRows * task.row_bytes, 2 * task.units);
    std::memset(scratch->totals, 0, sizeof(scratch->totals));
    for (int64_t first = 0; first < task.units; first += kSpanUnits) {
      const int64_t units = std::min(kSpanUnits, task.units - first);
      for (int64_t u = 0; u < units; ++u) {
        ahead.step();
        R::read(rows + (first + u) * R::kBytes, task.row_bytes, row_offsets, span.codes[u], span.scales[u], span.offsets[u]);
      }
      __asm__ volatile("" ::: "memory");  // tile loads don't tell the compiler what they read
      multiply_span<R::kHasMinimum, tokens>(span, first, units, x, scratch->products, scratch->totals, &ahead);
    }
    for (int64_t t = 0; t < x.count; ++t) {
      const float *total = scratch->totals + t * kRows;
      float *out = scratch->sums + t * kTaskRows + row - task.begin;
      if (start == row) vstore(out, vload(total));
      else std::copy(total + row - start, total + kRows, out);
    }
  }
}

// Sums of the tokens' blocks, by tiles too: 16 blocks times a column of ones each.
void sum_tokens(const Tokens &x, int64_t units) {
  constexpr uint32_t kOnes = 0x3f803f80;  // two bf16
  alignas(64) static constexpr auto kColumn = [] {
    std::array<uint32_t, 31> column{};
    column[15] = kOnes;
    return column;
  }();
  const TileSession session(shapes_of(x.count));
  for (int64_t first = 0; first < units; first += 16) {
    _tile_zero(0);
    for (int64_t u = first; u < std::min(first + 16, units); ++u) {
      _tile_loadd(2, x.data + u * kUnit, x.row_bytes());
      _tile_loadd(4, kColumn.data() + 15 - (u - first), 0);  // every row the same one
      _tile_dpbf16ps(0, 2, 4);
    }
    _tile_stored(0, x.sums + first, x.sums_stride * 4);
  }
}

using Formats = FormatList<SG_Q4_0, SG_Q4_1, SG_Q5_0, SG_Q5_1>;

int32_t supports(const sg_call *call) {
  LinearProblem p;
  if (!cpu_features().amx_bf16 || !read_linear<LinearOp::forward>(call, &p)) return 0;
  if (p.m < 1 || p.m > kTokens || p.n < kRows || p.k < kUnit || p.a.dtype != SG_BF16 || !Formats::has(p.b.dtype)) return 0;
  return p.m <= 2 ? 60 : 70;  // one or two tokens are multiplied faster by the dot products of linear_few_codes.cpp
}

// Bytes of workspace: the sums of tokens, then for each worker what it works in.
int64_t sums_stride(int64_t width) { return round_up(width / kUnit, 16); }
int64_t sums_bytes(int64_t width) { return kTokens * sums_stride(width) * static_cast<int64_t>(sizeof(float)); }

size_t workspace(const sg_call *call) {
  return static_cast<size_t>(sums_bytes(input(call, 0)->shape[1])) + sizeof(Scratch) * static_cast<size_t>(num_workers(call));
}

template <int32_t dtype, int tokens>
void run_on(const sg_call *call, const LinearProblem &p) {
  const Tokens x{static_cast<const bf16 *>(p.a.data), p.a.stride, p.m, static_cast<float *>(call->workspace),
                 sums_stride(p.k)};
  auto *scratches = reinterpret_cast<Scratch *>(static_cast<char *>(call->workspace) + sums_bytes(p.k));
  if constexpr (Reader<dtype>::kHasMinimum) sum_tokens(x, p.k / kUnit);
  const int64_t task_rows = p.n >= 4096 ? kTaskRows : p.n >= 1024 ? 64 : 32;
  parallel_for(call, (p.n + task_rows - 1) / task_rows, [&](int64_t index, int worker) {
    const int64_t begin = index * task_rows, end = std::min(p.n, begin + task_rows);
    p.finish.fetch(0, static_cast<int>(p.m), begin, end - begin);
    const Task task{static_cast<const uint8_t *>(p.b.data), p.b.row_bytes, p.k / kUnit, begin, end};
    multiply_task<dtype, tokens>(task, x, scratches + worker);
    p.finish(0, static_cast<int>(p.m), begin, static_cast<int>(end - begin), scratches[worker].sums, kTaskRows);
  });
}
template <int32_t dtype>
void run_on(const sg_call *call, const LinearProblem &p) {
  return p.m <= 4 ? run_on<dtype, 4>(call, p) : run_on<dtype, kTokens>(call, p);
}

int32_t run(const sg_call *call) {
  LinearProblem p;
  const bool known = read_linear<LinearOp::forward>(call, &p) &&
                     Formats::with(p.b.dtype, [&](auto tag) { run_on<decltype(tag)::value>(call, p); });
  return known ? SG_OK : fail(call, "linear: operands changed since the kernel was chosen");
}

constexpr sg_kernel linear{sizeof(sg_kernel), "linear", "cpu", SG_ISA_NAME "_bf16_codes_few",
                           SG_TRAIT_DETERMINISTIC | SG_TRAIT_IN_PLACE, 3, supports, workspace, nullptr, nullptr, run};
SG_REGISTER_KERNEL(linear);

}  // namespace
}  // namespace sg::cpu::SG_ISA

// linear for one to sixteen bf16 tokens on weights of 4- and 5-bit codes, on AMX's bf16 tiles. The codes are multiplied as
// they are, and a block's sum is scaled instead of its values: a tile holds the codes of one block of 16 rows, another one
// the same 32 elements of up to 16 tokens, and the square of their products is scaled and added by vectors whose lanes are
// the rows.
//
// A code c becomes the bf16 number 128 + c, whose bits are those of 128 with the code in the lowest: one operation makes
// 32 of them, wherever in a word the code lies. The 128 too much times the sum of the token's elements is taken back with
// the block's minimum. What the tiles want is a column for each row, so blocks are turned: 16 rows of four words of codes
// become four vectors, whose lanes are rows. Which elements then lie side by side is the tokens' to follow.
//
// Floor: the bytes of the weight once. A block costs about six vector operations to unpack and scale, whatever the number
// of tokens, and an eighth of one for each token; a tile instruction does 16 blocks.
//
// A token's sums run over K in one order: its bits don't depend on the other tokens, nor on how many there are, as long
// as this kernel runs.
#include <array>
#include <utility>

#include "linear.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kTokens = 16;                   // of a tile, and of a call at most
constexpr int64_t kRows = 16;                     // of weights in a tile
constexpr int64_t kUnit = 32;                     // elements of a block
constexpr int64_t kSpanUnits = 16;                // blocks of a row unpacked at a time, which stay in the first-level cache
constexpr int64_t kTaskRows = 128;                // the most rows of a task
constexpr int64_t kTileWords = 16 * 16;

// Codes and scales of 16 rows over a span of K.
struct Span {
  alignas(64) uint32_t codes[kSpanUnits][kTileWords];  // [pair of elements][row], two bf16 each
  alignas(64) float scales[kSpanUnits][kRows];
  alignas(64) float offsets[kSpanUnits][kRows];  // what is added to every value of a block, and to make up for the 128
};

// Tokens over one block.
template <int tokens>
struct TokenUnit {
  alignas(64) uint32_t values[tokens][16];  // pairs of elements in the order of a span's
  float sums[tokens];
};

// words[j], lane r: word j of the 16 bytes at p of row r.
inline void turn_rows(const uint8_t *p, int64_t row_bytes, __m512i (&words)[4]) {
  const auto row = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + r * row_bytes)); };
  __m512i z[4], pairs[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    z[i] = _mm512_castsi128_si512(row(i));
    z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x00f0, row(4 + i));
    z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x0f00, row(8 + i));
    z[i] = _mm512_mask_broadcast_i32x4(z[i], 0xf000, row(12 + i));
  }
  pairs[0] = _mm512_unpacklo_epi32(z[0], z[1]), pairs[1] = _mm512_unpackhi_epi32(z[0], z[1]);
  pairs[2] = _mm512_unpacklo_epi32(z[2], z[3]), pairs[3] = _mm512_unpackhi_epi32(z[2], z[3]);
  words[0] = _mm512_unpacklo_epi64(pairs[0], pairs[2]), words[1] = _mm512_unpackhi_epi64(pairs[0], pairs[2]);
  words[2] = _mm512_unpacklo_epi64(pairs[1], pairs[3]), words[3] = _mm512_unpackhi_epi64(pairs[1], pairs[3]);
}

// Element of a block that is the first of pair i; the second comes two later. A word of codes gives four pairs: its nibbles
// 0 and 4, 2 and 6, 1 and 5, 3 and 7; the odd ones of them belong to the block's second half.
constexpr int pair_element(int i) { return i / 4 * 4 + i % 2 + i % 4 / 2 * 16; }
constexpr int pair_shift(int i) { return i % 2 * 8 + i % 4 / 2 * 4; }

// A Reader: bytes of a block, and `read`, the block at p of 16 rows.
template <int bytes, bool has_minimum, bool has_high>
struct CodeReader {
  static constexpr int kBytes = bytes, kHigh = has_minimum ? 4 : 2, kCodes = kHigh + (has_high ? 4 : 0);
  static void read(const uint8_t *p, int64_t row_bytes, __m512i row_offsets, uint32_t *codes, float *scales,
                   float *offsets) {
    constexpr int kOr = 0xf8;  // a | (b & c)
    const __m512i nibbles = _mm512_set1_epi32(0x000f000f), base = _mm512_set1_epi32(0x43004300);  // 128, twice
    const __m512i first_bit = _mm512_set1_epi32(0x10), second_bit = _mm512_set1_epi32(0x100000);
    __m512i words[4], high;
    turn_rows(p + kCodes, row_bytes, words);
    if constexpr (has_high) high = _mm512_i32gather_epi32(row_offsets, p + kHigh, 1);
    const auto pair = [&]<int i>(std::integral_constant<int, i>) {
      __m512i code = _mm512_ternarylogic_epi32(base, _mm512_srli_epi32(words[i / 4], pair_shift(i)), nibbles, kOr);
      if constexpr (has_high) {
        constexpr int e = pair_element(i);
        code = _mm512_ternarylogic_epi32(code, _mm512_ror_epi32(high, (e + 28) % 32), first_bit, kOr);
        code = _mm512_ternarylogic_epi32(code, _mm512_ror_epi32(high, (e + 14) % 32), second_bit, kOr);
      }
      _mm512_store_si512(codes + 16 * i, code);
    };
    [&]<int... i>(std::integer_sequence<int, i...>) {
      (pair(std::integral_constant<int, i>()), ...);
    }(std::make_integer_sequence<int, 16>());
    const __m512i headers = _mm512_i32gather_epi32(row_offsets, p, 1);
    const vf d = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(headers));
    vstore(scales, d);
    if constexpr (has_minimum) {
      vstore(offsets, vfma(d, vset(-128.0f), _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(headers, 16)))));
    } else {
      vstore(offsets, vmul(d, vset(has_high ? -144.0f : -136.0f)));  // zero is the code in the middle
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

// Tile registers 0 and 1: sums; 2 and 3: tokens; 4 and 5: codes.
template <int tokens>
struct TileSession {
  struct Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {tokens, tokens, tokens, tokens, 16, 16};
  };
  TileSession() {
    alignas(64) static const Config config;
    _tile_loadconfig(&config);
  }
  ~TileSession() { _tile_release(); }
  TileSession(const TileSession &) = delete;
  TileSession &operator=(const TileSession &) = delete;
};

template <int tokens>
inline void multiply_even(const TokenUnit<tokens> &x, const uint32_t *codes, float *products) {
  _tile_zero(0);
  _tile_loadd(2, x.values, 64);
  _tile_loadd(4, codes, 64);
  _tile_dpbf16ps(0, 2, 4);
  _tile_stored(0, products, 64);
}
template <int tokens>
inline void multiply_odd(const TokenUnit<tokens> &x, const uint32_t *codes, float *products) {
  _tile_zero(1);
  _tile_loadd(3, x.values, 64);
  _tile_loadd(5, codes, 64);
  _tile_dpbf16ps(1, 3, 5);
  _tile_stored(1, products, 64);
}

// Units between the tiles and the scaling of their products: as long as these take to come back from memory.
constexpr int64_t kLead = 3, kRing = 4;

// totals[token][row] += the products of a span of `units`.
template <int tokens>
void multiply_span(const Span &span, int64_t units, const TokenUnit<tokens> *x, float *totals, FetchAhead *ahead) {
  alignas(64) float products[kRing][tokens * kRows];
  vf sums[tokens];
#pragma GCC unroll 16
  for (int t = 0; t < tokens; ++t) sums[t] = vload(totals + t * kRows);
  const auto multiply = [&](int64_t u) {
    if (u % 2 == 0) multiply_even(x[u], span.codes[u], products[u % kRing]);
    else multiply_odd(x[u], span.codes[u], products[u % kRing]);
  };
  for (int64_t u = 0; u < std::min(kLead, units); ++u) multiply(u);
  for (int64_t u = 0; u < units; ++u) {
    if (u + kLead < units) multiply(u + kLead);
    ahead->step();
    const vf scale = vload(span.scales[u]), offset = vload(span.offsets[u]);
    const float *product = products[u % kRing];
#pragma GCC unroll 16
    for (int t = 0; t < tokens; ++t) {
      sums[t] = vfma(vload(product + t * kRows), scale, sums[t]);
      sums[t] = vfma(vset(x[u].sums[t]), offset, sums[t]);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < tokens; ++t) vstore(totals + t * kRows, sums[t]);
}

struct Task {
  const uint8_t *weight;
  int64_t row_bytes, units, begin, end;  // units: of a row; rows [begin, end)
};

// sums[token][row - begin] of a task; x: of each unit.
template <int32_t dtype, int tokens>
void multiply_task(const Task &task, const TokenUnit<tokens> *x, Span *span, float *sums) {
  alignas(64) float totals[tokens * kRows];
  using R = Reader<dtype>;
  const TileSession<tokens> session;
  const __m512i row_offsets = _mm512_mullo_epi32(viota(), vset_int(static_cast<int32_t>(task.row_bytes)));
  for (int64_t row = task.begin; row < task.end; row += kRows) {
    const int64_t start = std::min(row, task.end - kRows);  // the last rows may be computed again, never past the end
    const uint8_t *rows = task.weight + start * task.row_bytes;
    FetchAhead ahead(rows, kRows * task.row_bytes, 2 * task.units);
    std::fill(totals, totals + tokens * kRows, 0.0f);
    for (int64_t first = 0; first < task.units; first += kSpanUnits) {
      const int64_t units = std::min(kSpanUnits, task.units - first);
      for (int64_t u = 0; u < units; ++u) {
        ahead.step();
        R::read(rows + (first + u) * R::kBytes, task.row_bytes, row_offsets, span->codes[u], span->scales[u],
                span->offsets[u]);
      }
      __asm__ volatile("" ::: "memory");  // tile loads don't tell the compiler what they read
      multiply_span<tokens>(*span, units, x + first, totals, &ahead);
    }
    for (int64_t t = 0; t < tokens; ++t) {
      if (start == row) vstore(sums + t * kTaskRows + row - task.begin, vload(totals + t * kRows));
      else std::copy(totals + t * kRows + row - start, totals + (t + 1) * kRows, sums + t * kTaskRows + row - task.begin);
    }
  }
}

// A block of a token: pairs in the tiles' order, and the sum of its elements.
inline void read_token(const bf16 *x, uint32_t *values, float *sum) {
  alignas(64) static constexpr auto kOrder = [] {
    std::array<uint16_t, 32> order{};
    for (int i = 0; i < 16; ++i) {
      order[2 * i] = static_cast<uint16_t>(pair_element(i));
      order[2 * i + 1] = static_cast<uint16_t>(pair_element(i) + 2);
    }
    return order;
  }();
  _mm512_store_si512(values, _mm512_permutexvar_epi16(_mm512_load_si512(kOrder.data()), _mm512_loadu_si512(x)));
  *sum = vsum(vadd(vload(x), vload(x + kLanes)));
}

// The tokens of a call; those that are missing are zero.
template <int tokens>
void read_tokens(const LinearProblem &p, TokenUnit<tokens> *x) {
  for (int64_t t = 0; t < tokens; ++t) {
    const bf16 *row = static_cast<const bf16 *>(p.a.data) + t * p.a.stride;
    for (int64_t u = 0; u < p.k / kUnit; ++u) {
      if (t < p.m) {
        read_token(row + u * kUnit, x[u].values[t], x[u].sums + t);
      } else {
        _mm512_store_si512(x[u].values[t], _mm512_setzero_si512());
        x[u].sums[t] = 0.0f;
      }
    }
  }
}

using Formats = FormatList<SG_Q4_0, SG_Q4_1, SG_Q5_0, SG_Q5_1>;

int32_t supports(const sg_call *call) {
  LinearProblem p;
  if (!cpu_features().amx_bf16 || !read_linear<LinearOp::forward>(call, &p)) return 0;
  if (p.m < 1 || p.m > kTokens || p.n < kRows || p.k < kUnit || p.a.dtype != SG_BF16 || !Formats::has(p.b.dtype)) return 0;
  return p.m <= 2 ? 60 : 70;  // one or two tokens are multiplied faster by the dot products of linear_few_codes.cpp
}

// Bytes of workspace: the tokens, then for each worker a span and a task's sums.
constexpr int64_t kWorkerBytes = sizeof(Span) + kTokens * kTaskRows * sizeof(float);
int64_t token_bytes(int64_t width) { return width / kUnit * static_cast<int64_t>(sizeof(TokenUnit<kTokens>)); }

size_t workspace(const sg_call *call) {
  return static_cast<size_t>(token_bytes(input(call, 0)->shape[1]) + kWorkerBytes * num_workers(call));
}

template <int32_t dtype, int tokens>
void run_on(const sg_call *call, const LinearProblem &p) {
  auto *x = static_cast<TokenUnit<tokens> *>(call->workspace);
  char *workers = static_cast<char *>(call->workspace) + token_bytes(p.k);
  read_tokens<tokens>(p, x);
  const int64_t task_rows = p.n >= 4096 ? kTaskRows : p.n >= 1024 ? 64 : 32;
  parallel_for(call, (p.n + task_rows - 1) / task_rows, [&](int64_t index, int worker) {
    auto *span = reinterpret_cast<Span *>(workers + worker * kWorkerBytes);
    float *sums = reinterpret_cast<float *>(span + 1);
    const int64_t begin = index * task_rows, end = std::min(p.n, begin + task_rows);
    p.finish.fetch(0, static_cast<int>(p.m), begin, end - begin);
    const Task task{static_cast<const uint8_t *>(p.b.data), p.b.row_bytes, p.k / kUnit, begin, end};
    multiply_task<dtype, tokens>(task, x, span, sums);
    p.finish(0, static_cast<int>(p.m), begin, static_cast<int>(end - begin), sums, kTaskRows);
  });
}
template <int32_t dtype>
void run_on(const sg_call *call, const LinearProblem &p) {
  return p.m <= 4 ? run_on<dtype, 4>(call, p) : p.m <= 8 ? run_on<dtype, 8>(call, p) : run_on<dtype, kTokens>(call, p);
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

// linear for up to 32 bf16 tokens on weights of 4- and 5-bit codes, on AMX's bf16 tiles, where a prompt's kernel would spend most
// of its time on unpacking. A block of a row has at most 32 values: they are computed and rounded once, and its codes are
// looked up among them, 32 at a time. What comes out are 32 consecutive elements of a row, so here the weight is the left
// side of a product, as it lies, and the tokens, which are few, are turned once to be the right one.
//
// Floor: the bytes of the weight once; a block of 16 rows costs about 110 vector operations and, for 32 tokens, 32 cycles of
// the tiles. What keeps it from there is the first-level cache, of which turned tokens of K 576 fill most: so little else is kept
// at hand, and each worker has tokens of its own, as lines that another one has written come slowly.
//
// Values are those of quant.h's `decode`, rounded to bf16, and products are summed in the order of linear_amx.cpp: the bits
// are the same as that kernel's.
#include "amx_tiles.h"
#include "linear.h"
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int64_t kTokens = 32;    // of a call at most: two tiles
constexpr int64_t kRows = 32;      // of weights multiplied together: two tiles
constexpr int64_t kTile = 16;      // rows of a tile
constexpr int64_t kUnit = 32;      // elements of a block, and of a tile's row
constexpr int64_t kTaskRows = 64;  // the most rows of a task
constexpr int64_t kLine = 16;      // words of 32 bits in a tile's row
constexpr int64_t kSumsStride = kRows + kTaskRows;

// out[j][i] = word j of row i, for 16 words that begin `offset` bytes into each of 16 rows. Lanes are put together as they
// are loaded, which leaves the port for shuffles half of the work that it would have.
SG_FLATTEN inline void turn_square(const char *const *rows, int64_t offset, uint32_t *out, int64_t stride) {
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {  // words 4 j to 4 j + 3
    const auto part = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(rows[i] + offset + 16 * j)); };
    __m512i z[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      z[i] = _mm512_castsi128_si512(part(i));
      z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x00f0, part(4 + i));
      z[i] = _mm512_mask_broadcast_i32x4(z[i], 0x0f00, part(8 + i));
      z[i] = _mm512_mask_broadcast_i32x4(z[i], 0xf000, part(12 + i));
    }
    const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    _mm512_storeu_si512(out + 4 * j * stride, _mm512_unpacklo_epi64(a, c));
    _mm512_storeu_si512(out + (4 * j + 1) * stride, _mm512_unpackhi_epi64(a, c));
    _mm512_storeu_si512(out + (4 * j + 2) * stride, _mm512_unpacklo_epi64(b, d));
    _mm512_storeu_si512(out + (4 * j + 3) * stride, _mm512_unpackhi_epi64(b, d));
  }
}

// A Reader: bytes of a block, and `read`, the block at p of 16 rows as a tile.
template <int bytes, bool has_minimum, bool has_high, int zero>
struct TableReader {
  static constexpr int kBytes = bytes, kHigh = has_minimum ? 4 : 2, kCodes = kHigh + (has_high ? 4 : 0);

  static vf numbers(int first) { return vto_float(_mm512_add_epi32(viota(), vset_int(first))); }

  SG_FLATTEN static void read(const uint8_t *p, int64_t row_bytes, __m512i row_offsets, uint32_t *tile) {
    constexpr int kAndOr = 0xea, kSelect = 0xe4;  // (a & b) | c; a where c, else b
    // Words 0 to 15 become the bytes of the codes, 16 to 31 the same ones, which are then moved down by four bits.
    const __m512i first = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 1, -1, 2, -1, 3, -1, 4, -1, 5, -1, 6, -1, 7, -1));
    const __m512i spread = _mm512_mask_add_epi16(first, 0xff00ff00, first, _mm512_set1_epi16(8));
    const __m512i down = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
    const __m512i nibble = _mm512_set1_epi16(15), second = _mm512_set1_epi16(16);
    alignas(64) float fields[2 * kTile];  // of each row: scale, and minimum where there is one
    const __m512i headers = _mm512_i32gather_epi32(row_offsets, p, 1);
    vstore(fields, _mm512_cvtph_ps(_mm512_castsi512_si256(headers)));
    vstore(fields + kTile, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(headers, 1)));
    const auto index = [&](int r) {
      const auto *codes = reinterpret_cast<const __m128i *>(p + r * row_bytes + kCodes);
      return _mm512_srlv_epi16(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(codes)), spread), down);
    };
    const auto values = [&](int r, int from) {
      const vf scale = vset(fields[2 * r]);
      return has_minimum ? vfma(numbers(from), scale, vset(fields[2 * r + 1])) : vmul(numbers(from - zero), scale);
    };
#pragma GCC unroll 8
    for (int r = 0; r < kTile; r += 2) {
      __m512i elements[2];
      if constexpr (has_high) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          const auto table = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(values(r + i, 16), values(r + i, 0)));
          const __m512i fifth = _mm512_movm_epi16(load_u32(p + (r + i) * row_bytes + kHigh));
          elements[i] = _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(index(r + i), fifth, nibble, kSelect), table);
        }
      } else {
        const auto table = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(values(r + 1, 0), values(r, 0)));
        elements[0] = _mm512_permutexvar_epi16(_mm512_and_si512(index(r), nibble), table);
        elements[1] = _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(index(r + 1), nibble, second, kAndOr), table);
      }
      _mm512_store_si512(tile + r * kLine, elements[0]);
      _mm512_store_si512(tile + (r + 1) * kLine, elements[1]);
    }
  }
};

template <int32_t dtype>
struct Reader;
template <>
struct Reader<SG_Q4_0> : TableReader<18, false, false, 8> {};
template <>
struct Reader<SG_Q4_1> : TableReader<20, true, false, 0> {};
template <>
struct Reader<SG_Q5_0> : TableReader<22, false, true, 16> {};
template <>
struct Reader<SG_Q5_1> : TableReader<24, true, true, 0> {};

// Blocks between unpacking and multiplying: tiles wait long for what was just written.
constexpr int64_t kLead = 1, kRing = 2;

// What a worker works in.
struct Scratch {
  alignas(64) uint32_t weights[kRing][kRows / kTile][kTile * kLine];
  alignas(64) float products[kRows][kTokens];
  alignas(64) float sums[kTokens][kSumsStride];  // the rows before the task's are those that are computed again
  bool has_tokens;  // of this call; they lie behind all this
};

inline int64_t token_tiles(int64_t tokens) { return (tokens + kTile - 1) / kTile; }

// products[row][token] of 32 rows; x: [unit][tile][pair of elements][token].
template <class R, int token_tiles>
void multiply_rows(const uint8_t *rows, int64_t row_bytes, __m512i row_offsets, int64_t units, const uint32_t *x,
                   Scratch *scratch, FetchAhead *ahead) {
  constexpr int64_t kSquare = kTile * kLine;
  _tile_zero(0);
  _tile_zero(2);
  if constexpr (token_tiles == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (int64_t u = 0; u < units + kLead; ++u) {
    if (u >= kLead) {
      const auto &weights = scratch->weights[(u - kLead) % kRing];
      const uint32_t *tokens = x + (u - kLead) * token_tiles * kSquare;
      _tile_loadd(4, weights[0], 64);
      _tile_loadd(6, tokens, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (token_tiles == 2) {
        _tile_loadd(7, tokens + kSquare, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_loadd(5, weights[1], 64);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (token_tiles == 2) _tile_dpbf16ps(3, 5, 7);
    }
    if (u >= units) continue;
    ahead->step();
    auto &weights = scratch->weights[u % kRing];
    const uint8_t *p = rows + u * R::kBytes;
    R::read(p, row_bytes, row_offsets, weights[0]);
    R::read(p + kTile * row_bytes, row_bytes, row_offsets, weights[1]);
    __asm__ volatile("" ::: "memory");  // tile loads don't tell the compiler what they read
  }
  _tile_stored(0, &scratch->products[0][0], sizeof(scratch->products[0]));
  _tile_stored(2, &scratch->products[kTile][0], sizeof(scratch->products[0]));
  if constexpr (token_tiles == 2) {
    _tile_stored(1, &scratch->products[0][kTile], sizeof(scratch->products[0]));
    _tile_stored(3, &scratch->products[kTile][kTile], sizeof(scratch->products[0]));
  }
}

struct Task {
  const uint8_t *weight;
  int64_t row_bytes, units, rows, begin, end;  // units: of a row; rows: of all tasks; rows [begin, end)
};

// scratch->sums[token][row - begin] of a task.
template <int32_t dtype, int token_tiles>
void multiply_task(const Task &task, const uint32_t *x, Scratch *scratch) {
  using R = Reader<dtype>;
  const TileSession session;  // registers 0 to 3: sums; 4 and 5: weights; 6 and 7: tokens
  const __m512i row_offsets = _mm512_mullo_epi32(viota(), vset_int(static_cast<int32_t>(task.row_bytes)));
  for (int64_t row = task.begin; row < task.end; row += kRows) {
    const int64_t start = std::min(row, task.rows - kRows);  // the last rows may be computed again, never past the end
    const uint8_t *rows = task.weight + start * task.row_bytes;
    FetchAhead ahead(rows, kRows * task.row_bytes, task.units);
    multiply_rows<R, token_tiles>(rows, task.row_bytes, row_offsets, task.units, x, scratch, &ahead);
    for (int64_t from = 0; from < kRows; from += kTile) {
      const char *lines[kTile];
      for (int64_t i = 0; i < kTile; ++i) lines[i] = reinterpret_cast<const char *>(scratch->products[from + i]);
      float *out = &scratch->sums[0][kRows + start + from - task.begin];
      for (int64_t tile = 0; tile < token_tiles; ++tile, out += kTile * kSumsStride) {
        turn_square(lines, tile * 64, reinterpret_cast<uint32_t *>(out), kSumsStride);
      }
    }
  }
}

using Formats = FormatList<SG_Q4_0, SG_Q4_1, SG_Q5_0, SG_Q5_1>;

int32_t supports(const sg_call *call) {
  LinearProblem p;
  if (!cpu_features().amx_bf16 || !read_linear<LinearOp::forward>(call, &p)) return 0;
  if (p.m < 1 || p.m > kTokens || p.n < kRows || p.k < kUnit || p.a.dtype != SG_BF16 || !Formats::has(p.b.dtype)) return 0;
  return 55;
}

int64_t token_bytes(int64_t tokens, int64_t width) { return token_tiles(tokens) * kTile * width * 2; }

size_t workspace(const sg_call *call) {
  const sg_tensor *x = input(call, 0);
  return (sizeof(Scratch) + static_cast<size_t>(token_bytes(x->shape[0], x->shape[1]))) * static_cast<size_t>(num_workers(call));
}

// Those that a tile has more than there are repeat the last one.
void turn_tokens(const LinearProblem &p, uint32_t *out) {
  const auto *x = static_cast<const bf16 *>(p.a.data);
  const int64_t tiles = token_tiles(p.m);
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const char *lines[kTile];
    for (int64_t i = 0; i < kTile; ++i) {
      lines[i] = reinterpret_cast<const char *>(x + std::min(tile * kTile + i, p.m - 1) * p.a.stride);
    }
    for (int64_t u = 0; u < p.k / kUnit; ++u) turn_square(lines, u * 64, out + (u * tiles + tile) * kTile * kLine, kLine);
  }
}

template <int32_t dtype, int tiles>
void run_on(const sg_call *call, const LinearProblem &p) {
  const int64_t worker_bytes = static_cast<int64_t>(sizeof(Scratch)) + token_bytes(p.m, p.k);
  const auto scratch_of = [&](int worker) {
    return reinterpret_cast<Scratch *>(static_cast<char *>(call->workspace) + worker * worker_bytes);
  };
  for (int w = 0; w < num_workers(call); ++w) scratch_of(w)->has_tokens = false;
  const int64_t task_rows = p.n >= 1024 ? kTaskRows : kRows;
  parallel_for(call, (p.n + task_rows - 1) / task_rows, [&](int64_t index, int worker) {
    Scratch *scratch = scratch_of(worker);
    auto *turned = reinterpret_cast<uint32_t *>(scratch + 1);
    if (!scratch->has_tokens) turn_tokens(p, turned);
    scratch->has_tokens = true;
    const int64_t begin = index * task_rows, end = std::min(p.n, begin + task_rows);
    p.finish.fetch(0, static_cast<int>(p.m), begin, end - begin);
    const Task task{static_cast<const uint8_t *>(p.b.data), p.b.row_bytes, p.k / kUnit, p.n, begin, end};
    multiply_task<dtype, tiles>(task, turned, scratch);
    p.finish(0, static_cast<int>(p.m), begin, static_cast<int>(end - begin), &scratch->sums[0][kRows], kSumsStride);
  });
}

int32_t run(const sg_call *call) {
  LinearProblem p;
  const bool known = read_linear<LinearOp::forward>(call, &p) && Formats::with(p.b.dtype, [&](auto tag) {
                       constexpr int32_t dtype = decltype(tag)::value;
                       if (p.m <= kTile) run_on<dtype, 1>(call, p);
                       else run_on<dtype, 2>(call, p);
                     });
  return known ? SG_OK : fail(call, "linear: operands changed since the kernel was chosen");
}

constexpr sg_kernel linear{sizeof(sg_kernel), "linear", "cpu", SG_ISA_NAME "_bf16_tables_few",
                           SG_TRAIT_DETERMINISTIC | SG_TRAIT_ROW_INVARIANT | SG_TRAIT_IN_PLACE, 3, supports, workspace,
                           nullptr, nullptr, run};
SG_REGISTER_KERNEL(linear);

}  // namespace
}  // namespace sg::cpu::SG_ISA

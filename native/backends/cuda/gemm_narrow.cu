// Products with one narrow side R of 16, 32, 48 or 64, on tensor cores, bf16 in, fp32 sums, bf16 or f32 out:
//
//   expand  D[m, n] = alpha A[m, R] op(B)[R, n] + beta C      floor: the bytes of D, and of C
//   shrink  D[m, R] = alpha A[m, k] op(B)[k, R] + beta C      floor: the bytes of A
//   gather  D[R, n] = alpha A[k, R]^T B[k, n] + beta C        floor: the bytes of the wide operand; or its transpose
//
// All of them read the wide operand from memory into the fragments of mma.m16n8k16, without shared memory. A sum's
// terms may stand in any order and columns may have any place in a fragment, if both operands agree: so each thread
// takes 16 neighbouring bytes, where the instruction's own layout would have it take 4. With g = lane / 4 and t = lane
// % 4,
//   A holds rows g, g + 8 and terms (2t, 2t+1), (2t+8, 2t+9); B holds column g and the same terms;
//   D holds rows g, g + 8 and columns 2t, 2t+1.
// Sums that warps or blocks share are added in a fixed order that depends on the shape alone. What a block reads first is on
// its way to the cache before the kernel ahead has ended.
#include "gemm_narrow.h"
#include "kernel.cuh"
#include "prefetch.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kMostNarrow = 64;

bool is_narrow_side(int64_t extent) { return extent % 16 == 0 && extent > 0 && extent <= kMostNarrow; }

// d[16, 8] += a[16, 16] b[16, 8].
__device__ inline void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The low (or high) halves of two words side by side.
__device__ inline uint32_t low_halves(uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x5410); }
__device__ inline uint32_t high_halves(uint32_t x, uint32_t y) { return __byte_perm(x, y, 0x7632); }

struct Words4 {
  uint32_t at[4];
};
__device__ inline Words4 load16(const bf16 *from, bool inside) {
  const uint4 v = inside ? *reinterpret_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ inline uint2 load8(const bf16 *from, bool inside) {
  return inside ? *reinterpret_cast<const uint2 *>(from) : make_uint2(0, 0);
}
__device__ inline uint32_t load4(const bf16 *from, bool inside) {
  return inside ? *reinterpret_cast<const uint32_t *>(from) : 0u;
}

struct NarrowProduct {
  int64_t m, n, k, lda, ldb, ldc, ldd;
  float alpha, beta;
  bool add_c;
};

__device__ inline int rows_from(int64_t first, int64_t end, int most) {
  return static_cast<int>(end - first < most ? end - first : most);
}

// ---- expand. A warp makes 16 rows; a block of 8 warps 128 rows and kExpandColumns columns.
constexpr int kExpandThreads = 256;
constexpr int kExpandRows = 128;
constexpr int kExpandColumns = 256;

// B's fragments for terms 16 * step .. + 15 of 32 columns: tile j's column g is 8 * (g / 2) + 2 * j + g % 2, so that a
// thread's eight results of a row are neighbours. Terms 4t .. 4t+3 are a thread's.
template <bool transpose_b>
__device__ inline void expand_b(const bf16 *b, const NarrowProduct &p, int64_t column, int step, int g, int t,
                                uint32_t (&b0)[4], uint32_t (&b1)[4]) {
  const int64_t mine = column + 8 * (g / 2);
  const bool inside = mine < p.n;
  if constexpr (transpose_b) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint2 terms = load8(b + (mine + 2 * j + g % 2) * p.ldb + 16 * step + 4 * t, inside);
      b0[j] = terms.x, b1[j] = terms.y;
    }
  } else {
    Words4 row[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) row[i] = load16(b + (16 * step + 4 * t + i) * p.ldb + mine, inside);
    const uint32_t select = g % 2 == 0 ? 0x5410 : 0x7632;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      b0[j] = __byte_perm(row[0].at[j], row[1].at[j], select);
      b1[j] = __byte_perm(row[2].at[j], row[3].at[j], select);
    }
  }
}

template <int steps, bool transpose_b, class D>
__global__ void __launch_bounds__(kExpandThreads)
    expand_kernel(NarrowProduct p, const bf16 *a, const bf16 *b, const D *c, D *d) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kExpandRows + threadIdx.x / 32 * 16;
  wait_for_kernels_ahead();
  if (first_row >= p.m) return;
  const int64_t row[2] = {first_row + g, first_row + g + 8};
  uint2 left[steps][2];
#pragma unroll
  for (int s = 0; s < steps; ++s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) left[s][h] = load8(a + row[h] * p.lda + 16 * s + 4 * t, row[h] < p.m);
  }
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kExpandColumns;
  const int64_t end = begin + kExpandColumns < p.n ? begin + kExpandColumns : p.n;
  constexpr int kParts = 2;  // of 32 columns, whose reads of C are under way together
  for (int64_t column = begin; column < end; column += 32 * kParts) {
    Pack<D, 8> before[kParts][2];
    if (p.add_c) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int64_t at = column + 32 * part + 8 * t;
          if (row[h] < p.m && at < end) before[part][h] = load_pack<8>(c + row[h] * p.ldc + at);
        }
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float sum[4][4] = {};
#pragma unroll
      for (int s = 0; s < steps; ++s) {
        uint32_t b0[4], b1[4];
        expand_b<transpose_b>(b, p, column + 32 * part, s, g, t, b0, b1);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          multiply(sum[j], left[s][0].x, left[s][1].x, left[s][0].y, left[s][1].y, b0[j], b1[j]);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t at = column + 32 * part + 8 * t;
        if (row[h] >= p.m || at >= end) continue;
        float result[8], old[8];
        if (p.add_c) to_floats<8>(before[part][h], old);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          result[i] = p.alpha * sum[i / 2][2 * h + i % 2];
          if (p.add_c) result[i] += p.beta * old[i];
        }
        store<8>(d + row[h] * p.ldd + at, result);
      }
    }
  }
}

// ---- shrink. A block makes 32 rows; its 16 warps share k, 32 * halves terms at a time, and add their sums in order.
constexpr int kShrinkThreads = 512;
constexpr int kShrinkWarps = kShrinkThreads / 32;
constexpr int kShrinkRows = 32;

// B's words for terms 8t .. 8t+7 of the 32 that begin at `term`, of tiles 2 * pair and 2 * pair + 1. Columns of the
// pair: transposed, 16 * pair + 8 * (tile % 2) + g, else 16 * pair + 2 * g + tile % 2.
template <bool transpose_b>
__device__ inline void shrink_b(const bf16 *b, const NarrowProduct &p, int64_t term, int pair, int g, int t,
                                Words4 (&tile)[2]) {
  const bool inside = term < p.k;
  if constexpr (transpose_b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) tile[i] = load16(b + (16 * pair + 8 * i + g) * p.ldb + term + 8 * t, inside);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bf16 *from = b + (term + 8 * t + 2 * i) * p.ldb + 16 * pair + 2 * g;
      const uint32_t one = load4(from, inside), next = load4(from + p.ldb, inside);
      tile[0].at[i] = low_halves(one, next);
      tile[1].at[i] = high_halves(one, next);
    }
  }
}

template <int pairs, bool transpose_b>
__device__ inline void shrink_sums(const NarrowProduct &p, const bf16 *a, const bf16 *b, int64_t first_row,
                                   float (&sum)[2][2 * pairs][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  constexpr int halves = pairs >= 3 ? 1 : 2;  // as many reads under way as registers allow
  for (int64_t k = 32 * halves * warp; k < p.k; k += 32 * halves * kShrinkWarps) {
    Words4 left[halves][2][2];  // 32 terms, 16 rows each, rows g and g + 8
#pragma unroll
    for (int i = 0; i < 4 * halves; ++i) {
      const int64_t row = first_row + 16 * (i / 2 % 2) + 8 * (i % 2) + g, term = k + 32 * (i / 4);
      left[i / 4][i / 2 % 2][i % 2] = load16(a + row * p.lda + term + 8 * t, row < p.m && term < p.k);
    }
#pragma unroll
    for (int half = 0; half < halves; ++half) {
#pragma unroll
      for (int pair = 0; pair < pairs; ++pair) {
        Words4 right[2];
        shrink_b<transpose_b>(b, p, k + 32 * half, pair, g, t, right);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // tile of the pair, 16 rows
          const Words4(&rows)[2] = left[half][i % 2];
          const Words4 &columns = right[i / 2];
          float(&into)[4] = sum[i % 2][2 * pair + i / 2];
          multiply(into, rows[0].at[0], rows[1].at[0], rows[0].at[1], rows[1].at[1], columns.at[0], columns.at[1]);
          multiply(into, rows[0].at[2], rows[1].at[2], rows[0].at[3], rows[1].at[3], columns.at[2], columns.at[3]);
        }
      }
    }
  }
}

template <int pairs, bool transpose_b, class D>
__global__ void __launch_bounds__(kShrinkThreads, 1)
    shrink_kernel(NarrowProduct p, const bf16 *a, const bf16 *b, const D *c, D *d) {
  __shared__ float parts[kShrinkWarps][kShrinkRows][16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kShrinkRows;
  constexpr int kFirstBytes = 2048;  // of a row
  bring_rows<kShrinkThreads, kFirstBytes>(a + first_row * p.lda, 2 * p.lda, rows_from(first_row, p.m, kShrinkRows), 2 * p.k);
  wait_for_kernels_ahead();
  float sum[2][2 * pairs][4] = {};
  shrink_sums<pairs, transpose_b>(p, a, b, first_row, sum);
#pragma unroll
  for (int pair = 0; pair < pairs; ++pair) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int rows = i / 8, tile = i / 4 % 2, at = i % 4;
      const int column = 2 * t + at % 2;
      parts[warp][16 * rows + g + 8 * (at / 2)][transpose_b ? 8 * tile + column : 2 * column + tile] =
          sum[rows][2 * pair + tile][at];
    }
    __syncthreads();
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kShrinkWarps; ++w) total += parts[w][row][column];
    const int64_t at_row = first_row + row, at_column = 16 * pair + column;
    if (at_row < p.m) {
      total *= p.alpha;
      if (p.add_c) total += p.beta * to_float(c[at_row * p.ldc + at_column]);
      d[at_row * p.ldd + at_column] = from_float<D>(total);
    }
  }
}

// ---- gather. A block makes 64 columns of the wide operand from one part of k, which its 8 warps share, 32 terms at a
// time; what the parts give is added by a second kernel.
constexpr int kGatherThreads = 256;
constexpr int kGatherWarps = kGatherThreads / 32;
constexpr int kGatherColumns = 64;
constexpr int kGatherStride = kGatherColumns + 4;  // spreads rows over the banks

struct GatherProduct {
  const bf16 *wide, *narrow;
  int64_t columns, k, wide_stride, narrow_stride, part;  // part: terms of one block, a multiple of 32
};

template <int tiles>
__device__ inline void gather_sums(const GatherProduct &p, int64_t first_column, int64_t begin, int64_t end,
                                   float (&sum)[tiles][8][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t mine = first_column + 8 * g;  // a thread's eight columns, one for each tile of B
  for (int64_t k = begin + 32 * warp; k < end; k += 32 * kGatherWarps) {
    Words4 row[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t term = k + 16 * (i / 4) + 4 * t + i % 4;
      row[i / 4][i % 4] = load16(p.wide + term * p.wide_stride + mine, term < end && mine < p.columns);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t left[tiles][4];  // row g of A is row 2g of the result, row g + 8 is 2g + 1
#pragma unroll
      for (int m = 0; m < tiles; ++m) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int64_t term = k + 16 * half + 4 * t + i;
          word[i] = load4(p.narrow + term * p.narrow_stride + 16 * m + 2 * g, term < end);
        }
        left[m][0] = low_halves(word[0], word[1]), left[m][1] = high_halves(word[0], word[1]);
        left[m][2] = low_halves(word[2], word[3]), left[m][3] = high_halves(word[2], word[3]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t select = j % 2 == 0 ? 0x5410 : 0x7632;
        const uint32_t b0 = __byte_perm(row[half][0].at[j / 2], row[half][1].at[j / 2], select);
        const uint32_t b1 = __byte_perm(row[half][2].at[j / 2], row[half][3].at[j / 2], select);
#pragma unroll
        for (int m = 0; m < tiles; ++m) multiply(sum[m][j], left[m][0], left[m][1], left[m][2], left[m][3], b0, b1);
      }
    }
  }
}

// partial[part][16 * tiles][columns].
template <int tiles>
__global__ void __launch_bounds__(kGatherThreads, tiles <= 2 ? 2 : 1) gather_kernel(GatherProduct p, float *partial) {
  __shared__ __align__(16) float parts[kGatherWarps][16][kGatherStride];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kGatherColumns;
  const int64_t begin = blockIdx.y * p.part, end = begin + p.part < p.k ? begin + p.part : p.k;
  bring_rows<kGatherThreads, 2 * kGatherColumns>(p.wide + begin * p.wide_stride + first_column, 2 * p.wide_stride,
                                                 rows_from(begin, end, 32 * kGatherWarps), 2 * (p.columns - first_column));
  wait_for_kernels_ahead();
  float sum[tiles][8][4] = {};
  gather_sums<tiles>(p, first_column, begin, end, sum);
  float *to = partial + static_cast<int64_t>(blockIdx.y) * (16 * tiles) * p.columns;
#pragma unroll
  for (int m = 0; m < tiles; ++m) {
    __syncthreads();
    // Tile j's column 2t is the block's 16t + j, column 2t + 1 is 16t + 8 + j: sixteen neighbours in each of two rows.
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = i / 2, j = i % 2 * 4;
      *reinterpret_cast<float4 *>(&parts[warp][2 * g + at / 2][16 * t + 8 * (at % 2) + j]) =
          make_float4(sum[m][j][at], sum[m][j + 1][at], sum[m][j + 2][at], sum[m][j + 3][at]);
    }
    __syncthreads();
    const int row = threadIdx.x / 16, column = threadIdx.x % 16 * 4;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kGatherWarps; ++w) {
      const float4 part = *reinterpret_cast<const float4 *>(&parts[w][row][column]);
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    if (first_column + column < p.columns) {
      *reinterpret_cast<float4 *>(to + (16 * m + row) * p.columns + first_column + column) = total;
    }
  }
}

// D = alpha * the sum of the parts, in order, + beta C. Row i and column j of D are row i and column j of a part, or
// the other way round.
template <class D>
__global__ void __launch_bounds__(256)
    add_parts_kernel(const float *partial, int parts, bool turned, NarrowProduct p, const D *c, D *d) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  wait_for_kernels_ahead();
  if (index >= p.m * p.n) return;
  const int64_t i = index / p.n, j = index % p.n;
  const float *from = partial + (turned ? j * p.m + i : index);
  float total = 0.0f;
#pragma unroll 8
  for (int s = 0; s < parts; ++s) total += from[s * p.m * p.n];
  total *= p.alpha;
  if (p.add_c) total += p.beta * to_float(c[i * p.ldc + j]);
  d[i * p.ldd + j] = from_float<D>(total);
}

// Parts of k for `columns` columns: enough blocks for any device, and 256 terms at least in each.
int64_t gather_parts(int64_t columns, int64_t k) {
  const int64_t wanted = ceil_div(512, ceil_div(columns, kGatherColumns)), most = ceil_div(k, 256);
  const int64_t parts = wanted < most ? wanted : most;
  return ceil_div(k, ceil_div(ceil_div(k, parts), 32) * 32);
}

// ---- which of them
bool is_gather(const GemmProblem &p) { return p.transpose_a; }
bool is_expand(const GemmProblem &p) { return !p.transpose_a && is_narrow_side(p.k); }
bool gathers_by_rows(const GemmProblem &p) { return is_narrow_side(p.m); }  // the narrow side is D's rows

// launch(std::integral_constant<int, extent / 16>)
template <class Launch>
void with_tiles(int64_t extent, Launch &&launch) {
  switch (extent / 16) {
    case 1:
      return launch(std::integral_constant<int, 1>{});
    case 2:
      return launch(std::integral_constant<int, 2>{});
    case 3:
      return launch(std::integral_constant<int, 3>{});
    default:
      return launch(std::integral_constant<int, 4>{});
  }
}

template <class D>
void run_gather(const GemmProblem &q, const NarrowProduct &p, const bf16 *a, const bf16 *b, const D *c, D *d,
                float *partial, cudaStream_t stream) {
  const bool rows = gathers_by_rows(q);
  const int64_t columns = rows ? q.n : q.m, parts = gather_parts(columns, q.k);
  const GatherProduct product{rows ? b : a,
                              rows ? a : b,
                              columns,
                              q.k,
                              rows ? q.ldb : q.lda,
                              rows ? q.lda : q.ldb,
                              ceil_div(ceil_div(q.k, parts), 32) * 32};
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, kGatherColumns)), static_cast<unsigned>(parts));
  with_tiles(rows ? q.m : q.n, [&](auto tiles) {
    launch_ahead(stream, grid, kGatherThreads, 0, gather_kernel<decltype(tiles)::value>, product, partial);
  });
  const auto blocks = static_cast<unsigned>(ceil_div(q.m * q.n, 256));
  launch_ahead(stream, blocks, 256, 0, add_parts_kernel<D>, partial, static_cast<int>(parts), !rows, p, c, d);
}

template <bool transpose_b, class D>
void run_wide(const GemmProblem &q, const NarrowProduct &p, const bf16 *a, const bf16 *b, const D *c, D *d,
              cudaStream_t stream) {
  if (is_expand(q)) {
    const dim3 grid(static_cast<unsigned>(ceil_div(q.n, kExpandColumns)),
                    static_cast<unsigned>(ceil_div(q.m, kExpandRows)));
    with_tiles(q.k, [&](auto tiles) {
      launch_ahead(stream, grid, kExpandThreads, 0, expand_kernel<decltype(tiles)::value, transpose_b, D>, p, a, b, c, d);
    });
  } else {
    const auto blocks = static_cast<unsigned>(ceil_div(q.m, kShrinkRows));
    with_tiles(q.n, [&](auto tiles) {
      launch_ahead(stream, blocks, kShrinkThreads, 0, shrink_kernel<decltype(tiles)::value, transpose_b, D>, p, a, b, c, d);
    });
  }
}

template <class D>
void run_narrow(const GemmProblem &q, const NarrowProduct &p, const void *a_data, const void *b_data,
                const void *c_data, void *d_data, void *workspace, cudaStream_t stream) {
  const auto *a = static_cast<const bf16 *>(a_data), *b = static_cast<const bf16 *>(b_data);
  const auto *c = static_cast<const D *>(c_data);
  auto *d = static_cast<D *>(d_data);
  if (is_gather(q)) return run_gather<D>(q, p, a, b, c, d, static_cast<float *>(workspace), stream);
  if (q.transpose_b) return run_wide<true, D>(q, p, a, b, c, d, stream);
  run_wide<false, D>(q, p, a, b, c, d, stream);
}

}  // namespace

bool narrow_supports(const GemmProblem &p) {
  const auto packs = [](int64_t stride, int32_t dtype) { return stride * (dtype == SG_F32 ? 4 : 2) % 16 == 0; };
  if (p.ab_dtype != SG_BF16 || p.has_bias || p.m == 0 || p.n == 0 || p.k == 0) return false;
  if (!packs(p.lda, SG_BF16) || !packs(p.ldb, SG_BF16) || !packs(p.ldd, p.d_dtype)) return false;
  if (p.add_c && !packs(p.ldc, p.d_dtype)) return false;
  if (is_gather(p)) {
    const bool has_narrow_side = is_narrow_side(p.m) || is_narrow_side(p.n);
    return has_narrow_side && !p.transpose_b && p.m % 8 == 0 && p.n % 8 == 0;
  }
  if (is_expand(p)) return p.n % 8 == 0;
  return is_narrow_side(p.n) && p.k % 32 == 0;
}

size_t narrow_workspace_bytes(const GemmProblem &p) {
  if (!is_gather(p)) return 0;
  const int64_t parts = gather_parts(gathers_by_rows(p) ? p.n : p.m, p.k);
  return static_cast<size_t>(parts * p.m * p.n) * sizeof(float);
}

void narrow_gemm(const GemmProblem &q, float alpha, const void *a, const void *b, float beta, const void *c, void *d,
                 void *workspace, cudaStream_t stream) {
  const NarrowProduct p{q.m, q.n, q.k, q.lda, q.ldb, q.ldc, q.ldd, alpha, beta, q.add_c};
  const auto run = q.d_dtype == SG_F32 ? run_narrow<float> : run_narrow<bf16>;
  run(q, p, a, b, c, d, workspace, stream);
}

}  // namespace sg::cuda

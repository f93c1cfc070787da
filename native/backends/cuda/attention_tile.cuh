// Tiles of bf16 in shared memory: rows of DIM elements, loaded from and stored to rows of a head, and multiplied by a
// warp.
//
// The 16-byte chunk c of row r lies at chunk c ^ (r % 8) of the row: eight rows of one chunk, which is what one step of
// ldmatrix reads, then lie in eight different groups of four banks. Tiles begin at multiples of their row's bytes, so
// the address of chunk 2 j + b differs from that of chunk b by an exclusive or with 32 j.
#pragma once

#include "attention_common.cuh"
#include "attention_ptx.cuh"

namespace sg::cuda {

template <int DIM>
constexpr int kRowBytes = DIM * 2;

// Starts to load rows [first, first + ROWS) of a head; zeros past its dim and from row `limit` on. By all threads of a
// block.
template <int DIM, int ROWS>
__device__ __forceinline__ void load_tile(unsigned char *tile, const HeadRows<const bf16> &from, int first, int limit) {
  constexpr int chunks = DIM / 8, step = kAttentionThreads / chunks;
  static_assert(ROWS % step == 0);
  const int chunk = threadIdx.x % chunks, own = threadIdx.x / chunks;
  if (from.packs) {
    const bool in_row = chunk * 8 < from.dim;
    const bf16 *source = from.row(first + own) + chunk * 8;
    const uint32_t to = shared_address(tile);
#pragma unroll
    for (int i = 0; i < ROWS / step; ++i, source += step * from.stride) {
      const int row = own + i * step;
      const bool valid = in_row && first + row < limit;
      copy_async_16(to + row * kRowBytes<DIM> + ((chunk ^ (row & 7)) << 4), source, valid);
    }
    return;
  }
  for (int row = own; row < ROWS; row += step) {
    bf16 *to = reinterpret_cast<bf16 *>(tile + row * kRowBytes<DIM> + ((chunk ^ (row & 7)) << 4));
    const int count = first + row < limit ? min(from.dim - chunk * 8, 8) : 0;
    const bf16 *source = from.row(count > 0 ? first + row : 0) + chunk * 8;
    for (int i = 0; i < 8; ++i) to[i] = i < count ? source[i] : from_float<bf16>(0.0f);
  }
}

// Fragments of sums, times `factor`, into a tile's rows [16 MT], columns [8 NT], by the warp that owns the rows.
// factor[mt][half] is that of row 16 mt + 8 half + lane / 4.
template <int DIM, int MT, int NT>
__device__ __forceinline__ void put_fragments(unsigned char *tile, const float (&sums)[MT][NT][4],
                                              const float (&factor)[MT][2]) {
  const int lane = threadIdx.x % 32, group = lane / 4;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      unsigned char *row = tile + (mt * 16 + half * 8 + group) * kRowBytes<DIM> + (lane % 4) * 4;
      const float f = factor[mt][half];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        *reinterpret_cast<uint32_t *>(row + ((nt ^ group) << 4)) =
            pack_bf16(sums[mt][nt][2 * half] * f, sums[mt][nt][2 * half + 1] * f);
      }
    }
  }
}

// Packed fragments into a tile's rows [16 MT], columns from chunk `chunk` (even) on, and from there. To read, `tile` is
// the tile's address plus lane_by_rows.
template <int DIM, int MT, int KT>
__device__ __forceinline__ void put_packed(unsigned char *tile, const uint32_t (&packed)[MT][KT][4], int chunk) {
  const int lane = threadIdx.x % 32, group = lane / 4;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
    for (int i = 0; i < KT * 4; ++i) {
      unsigned char *row = tile + (mt * 16 + i % 2 * 8 + group) * kRowBytes<DIM> + (lane % 4) * 4;
      *reinterpret_cast<uint32_t *>(row + (((chunk + i / 2) ^ group) << 4)) = packed[mt][i / 4][i % 4];
    }
  }
}
template <int DIM, int MT, int KT>
__device__ __forceinline__ void get_packed(uint32_t (&packed)[MT][KT][4], uint32_t tile, int chunk) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
    for (int step = 0; step < KT; ++step) {
      load_matrices(packed[mt][step], (tile ^ ((chunk + 2 * step) << 4)) + mt * 16 * kRowBytes<DIM>);
    }
  }
}

// Columns [0, COLUMNS) of a tile's ROWS rows, by one warp, to columns from `column` on of rows [first, limit) of a
// head.
template <int DIM, int ROWS, int COLUMNS>
__device__ __forceinline__ void store_rows(const unsigned char *tile, const HeadRows<bf16> &to, int first, int limit,
                                           int column) {
  constexpr int chunks = COLUMNS / 8;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < ROWS * chunks; i += 32) {
    const int row = i / chunks, chunk = i % chunks, at = column + chunk * 8;
    if (first + row >= limit || at >= to.dim) continue;
    const unsigned char *from = tile + row * kRowBytes<DIM> + ((chunk ^ (row & 7)) << 4);
    bf16 *target = to.row(first + row) + at;
    if (to.packs) {
      *reinterpret_cast<uint4 *>(target) = *reinterpret_cast<const uint4 *>(from);
    } else {
      const bf16 *elements = reinterpret_cast<const bf16 *>(from);
      for (int j = 0; j < min(to.dim - at, 8); ++j) target[j] = elements[j];
    }
  }
}

// Where this lane points when fragments of A are loaded from rows, or of B from columns (transposed): row lane % 16 of
// the tile, chunk lane / 16.
template <int DIM>
__device__ inline uint32_t lane_by_rows() {
  const int lane = threadIdx.x % 32;
  return (lane & 15) * kRowBytes<DIM> + (((lane >> 4) ^ (lane & 7)) << 4);
}
// And when two fragments of B are loaded from rows: row lane % 8 + 8 * (lane / 16), chunk lane / 8 % 2.
template <int DIM>
__device__ inline uint32_t lane_by_columns() {
  const int lane = threadIdx.x % 32;
  return ((lane & 7) + ((lane >> 4) << 3)) * kRowBytes<DIM> + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
}

// sums[16 MT, 8 NT] = a[16 MT, DIM] * b[8 NT, DIM]^T. a: address of the tile's row, plus lane_by_rows; b: of the tile,
// plus lane_by_columns.
template <int DIM, int MT, int NT>
__device__ __forceinline__ void multiply_rows(float (&sums)[MT][NT][4], uint32_t a, uint32_t b) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[mt][nt][i] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    uint32_t rows[MT][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) load_matrices(rows[mt], (a ^ (step << 5)) + mt * 16 * kRowBytes<DIM>);
#pragma unroll
    for (int pair = 0; pair < NT / 2; ++pair) {
      uint32_t columns[4];
      load_matrices(columns, (b ^ (step << 5)) + pair * 16 * kRowBytes<DIM>);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        multiply_fragments(sums[mt][2 * pair], rows[mt], columns[0], columns[1]);
        multiply_fragments(sums[mt][2 * pair + 1], rows[mt], columns[2], columns[3]);
      }
    }
  }
}

// sums[16 MT, 8 NT] += a[16 MT, 16 KT] * b[16 KT, 8 NT]. b: address of the tile's first column, plus lane_by_rows.
template <int DIM, int MT, int KT, int NT>
__device__ __forceinline__ void multiply_packed(float (&sums)[MT][NT][4], const uint32_t (&a)[MT][KT][4], uint32_t b) {
#pragma unroll
  for (int step = 0; step < KT; ++step) {
#pragma unroll
    for (int pair = 0; pair < NT / 2; ++pair) {
      uint32_t columns[4];
      load_matrices_transposed(columns, (b ^ (pair << 5)) + step * 16 * kRowBytes<DIM>);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        multiply_fragments(sums[mt][2 * pair], a[mt][step], columns[0], columns[1]);
        multiply_fragments(sums[mt][2 * pair + 1], a[mt][step], columns[2], columns[3]);
      }
    }
  }
}

// Sums rounded to bf16, as the left operand of the next product.
template <int MT, int NT>
__device__ __forceinline__ void pack_fragments(uint32_t (&packed)[MT][NT / 2][4], const float (&sums)[MT][NT][4]) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      packed[mt][nt / 2][nt % 2 * 2] = pack_bf16(sums[mt][nt][0], sums[mt][nt][1]);
      packed[mt][nt / 2][nt % 2 * 2 + 1] = pack_bf16(sums[mt][nt][2], sums[mt][nt][3]);
    }
  }
}

}  // namespace sg::cuda

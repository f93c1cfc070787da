// attention in fp32 arithmetic throughout, on the general cores: what fp32 runs and tests use, and bf16 where heads are too
// wide for the tiles of attention.cu. One block of 256 threads owns 16 rows (queries; for dk and dv keys) and walks over
// tiles of 16 columns. A thread holds one logit of a tile (row thread / 16, column thread % 16), and of its row's sums
// every 64th group of four dims. Heads are padded with zeros to DIM. Floor: the FLOPs of attention at the rate of FFMA;
// it reads two words of shared memory a multiply-add, and is not near it.
#pragma once

#include "attention_common.cuh"

namespace sg::cuda {

constexpr int kF32Tile = 16;
constexpr int kF32Threads = kF32Tile * kF32Tile;

// Rows of DIM floats and four more, so that 16-byte reads of one column group in eight rows hit all banks once.
template <int DIM>
constexpr int kF32Pitch = DIM + 4;
template <int DIM>
constexpr size_t kF32TileBytes = kF32Tile * kF32Pitch<DIM> * sizeof(float);
constexpr int kF32WeightPitch = kF32Tile + 1;
constexpr size_t kF32WeightBytes = kF32Tile * kF32WeightPitch * sizeof(float);

template <int DIM, class T>
__device__ inline void load_tile_f32(float *tile, const HeadRows<const T> &from, int first, int limit) {
  for (int i = threadIdx.x; i < kF32Tile * DIM; i += kF32Threads) {
    const int row = i / DIM, column = i % DIM;
    const bool valid = first + row < limit && column < from.dim;
    tile[row * kF32Pitch<DIM> + column] = valid ? to_float(from.row(first + row)[column]) : 0.0f;
  }
}

template <int DIM>
__device__ inline float dot_f32(const float *a, const float *b) {
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
  for (int i = 0; i < DIM; i += 4) {
    const float4 x = *reinterpret_cast<const float4 *>(a + i), y = *reinterpret_cast<const float4 *>(b + i);
    sum[0] = fmaf(x.x, y.x, sum[0]);
    sum[1] = fmaf(x.y, y.y, sum[1]);
    sum[2] = fmaf(x.z, y.z, sum[2]);
    sum[3] = fmaf(x.w, y.w, sum[3]);
  }
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// sums += weights[16] . tile[16, this thread's dims]
template <int DIM>
__device__ inline void add_rows_f32(float (&sums)[DIM / 64][4], const float *weights, const float *tile) {
  const float *own = tile + threadIdx.x % kF32Tile * 4;
#pragma unroll 4
  for (int j = 0; j < kF32Tile; ++j) {
    const float weight = weights[j];
#pragma unroll
    for (int i = 0; i < DIM / 64; ++i) {
      const float4 x = *reinterpret_cast<const float4 *>(own + j * kF32Pitch<DIM> + i * 64);
      sums[i][0] = fmaf(weight, x.x, sums[i][0]);
      sums[i][1] = fmaf(weight, x.y, sums[i][1]);
      sums[i][2] = fmaf(weight, x.z, sums[i][2]);
      sums[i][3] = fmaf(weight, x.w, sums[i][3]);
    }
  }
}

// This thread's dims of its row, times `factor`.
template <int DIM, class T>
__device__ inline void store_sums_f32(const HeadRows<T> &to, int row, const float (&sums)[DIM / 64][4], float factor) {
#pragma unroll
  for (int i = 0; i < DIM / 64; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = i * 64 + threadIdx.x % kF32Tile * 4 + j;
      if (column < to.dim) to.row(row)[column] = from_float<T>(sums[i][j] * factor);
    }
  }
}

// Over the 16 threads of a row.
__device__ inline float row_max_f32(float value) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}
__device__ inline float row_sum_f32(float value) {
#pragma unroll
  for (int offset = 8; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <class T>
struct ForwardOperandsF32 {
  HeadRows<const T> q, k, v;
  HeadRows<T> o;
  float *lse;
};

template <int DIM, class T>
__global__ void __launch_bounds__(kF32Threads)
    attention_forward_f32(const AttentionShape shape, const ForwardOperandsF32<T> operands) {
  extern __shared__ __align__(1024) unsigned char shared[];
  float *const q_tile = reinterpret_cast<float *>(shared);
  float *const k_tile = q_tile + kF32Tile * kF32Pitch<DIM>, *const v_tile = k_tile + kF32Tile * kF32Pitch<DIM>;
  float *const weights = v_tile + kF32Tile * kF32Pitch<DIM>;
  TokenRange *const ranges = reinterpret_cast<TokenRange *>(weights + kF32Tile * kF32WeightPitch);

  const int head = blockIdx.x % shape.heads, first = static_cast<int>(blockIdx.x / shape.heads) * kF32Tile;
  const int own = threadIdx.x / kF32Tile, column = threadIdx.x % kF32Tile, row = first + own;
  load_tile_f32<DIM>(q_tile, operands.q.head(head), first, shape.tokens);
  if (column == 0) ranges[own] = keys_of(shape, min(row, shape.tokens - 1));
  __syncthreads();
  const Bounds block = bounds_of(ranges, kF32Tile);
  const TokenRange range = ranges[own];
  float sums[DIM / 64][4] = {};
  float peak = -INFINITY, total = 0.0f;
  for (int key = block.begin; key < block.end; key += kF32Tile) {
    __syncthreads();
    load_tile_f32<DIM>(k_tile, operands.k.head(head / shape.group), key, shape.tokens);
    load_tile_f32<DIM>(v_tile, operands.v.head(head / shape.group), key, shape.tokens);
    __syncthreads();
    float logit = shape.scale * dot_f32<DIM>(q_tile + own * kF32Pitch<DIM>, k_tile + column * kF32Pitch<DIM>);
    if (shape.softcap > 0.0f) logit = shape.softcap * tanhf(logit / shape.softcap);
    if (key + column < range.begin || key + column >= range.end) logit = -INFINITY;
    const float highest = fmaxf(peak, row_max_f32(logit)), shift = highest == -INFINITY ? 0.0f : highest;
    const float shrink = expf(peak - shift), weight = expf(logit - shift);
    peak = highest;
    total = fmaf(total, shrink, row_sum_f32(weight));
    weights[own * kF32WeightPitch + column] = weight;
    __syncwarp();  // a row's threads are of one warp
#pragma unroll
    for (int i = 0; i < DIM / 64; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] *= shrink;
    }
    add_rows_f32<DIM>(sums, weights + own * kF32WeightPitch, v_tile);
  }
  if (row >= shape.tokens) return;
  const bool seen = !(total == 0.0f);
  store_sums_f32<DIM>(operands.o.head(head), row, sums, seen ? 1.0f / total : NAN);
  if (column == 0) operands.lse[static_cast<int64_t>(row) * shape.heads + head] = seen ? peak + logf(total) : NAN;
}

template <int DIM, class T>
void start_forward_f32(const sg_call *call, const AttentionShape &shape, const ForwardOperandsF32<T> &operands) {
  launch(attention_forward_f32<DIM, T>, ceil_div(shape.tokens, kF32Tile) * shape.heads, kF32Threads,
         3 * kF32TileBytes<DIM> + kF32WeightBytes + kF32Tile * sizeof(TokenRange), stream(call), shape, operands);
}

}  // namespace sg::cuda

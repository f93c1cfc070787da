// attention_grad in fp32 arithmetic throughout, as attention_f32.cuh; and delta = do . o, which both backwards begin
// with.
#pragma once

#include "attention_f32.cuh"

namespace sg::cuda {

constexpr int kDeltaThreads = 256;
constexpr int kDeltaLanes = 16;  // of one row

// delta[t, h] = do[t, h] . o[t, h], in fp32. do and o [T, H, dim], delta f32 [T, H]. Floor: the bytes of do and o.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads)
    attention_delta(const HeadRows<const T> grad, const HeadRows<const T> o, float *delta, int64_t rows, int heads) {
  constexpr int pack = 16 / sizeof(T);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kDeltaThreads / kDeltaLanes) + threadIdx.x / kDeltaLanes;
  const int lane = threadIdx.x % kDeltaLanes;
  float sum = 0.0f;
  if (row < rows) {
    const int token = static_cast<int>(row / heads), head = static_cast<int>(row % heads);
    const T *x = grad.head(head).row(token), *y = o.head(head).row(token);
    if (grad.packs && o.packs) {
      for (int i = lane * pack; i < o.dim; i += kDeltaLanes * pack) {
        float a[pack], b[pack];
        load<pack>(x + i, a);
        load<pack>(y + i, b);
#pragma unroll
        for (int j = 0; j < pack; ++j) sum = fmaf(a[j], b[j], sum);
      }
    } else {
      for (int i = lane; i < o.dim; i += kDeltaLanes) sum = fmaf(to_float(x[i]), to_float(y[i]), sum);
    }
  }
  sum = row_sum_f32(sum);
  if (row < rows && lane == 0) delta[row] = sum;
}

template <class T>
void start_delta(const sg_call *call, const AttentionShape &shape, const HeadRows<const T> &grad,
                 const HeadRows<const T> &o, float *delta) {
  const int64_t rows = static_cast<int64_t>(shape.tokens) * shape.heads;
  launch(attention_delta<T>, ceil_div(rows, kDeltaThreads / kDeltaLanes), kDeltaThreads, 0, stream(call), grad, o,
         delta, rows, shape.heads);
}

template <class T>
struct BackwardOperandsF32 {
  HeadRows<const T> grad, q, k, v;  // grad: do
  HeadRows<T> dq, dk, dv;
  const float *lse, *delta;
};

// The weight of a pair, and the gradient of its product q.k (scale included), zeros where it is hidden.
struct PairF32 {
  float weight, grad;
  __device__ PairF32(const AttentionShape &shape, float product, float dweight, float lse, float delta, bool visible) {
    float logit = shape.scale * product, slope = shape.scale;
    if (shape.softcap > 0.0f) {
      const float ratio = tanhf(logit / shape.softcap);
      logit = shape.softcap * ratio;
      slope *= 1.0f - ratio * ratio;
    }
    weight = visible ? expf(logit - lse) : 0.0f;
    grad = visible ? weight * (dweight - delta) * slope : 0.0f;
  }
};

template <int DIM, class T>
__global__ void __launch_bounds__(kF32Threads)
    attention_query_grad_f32(const AttentionShape shape, const BackwardOperandsF32<T> operands) {
  constexpr int tile_floats = kF32Tile * kF32Pitch<DIM>;
  extern __shared__ __align__(1024) unsigned char shared[];
  float *const q_tile = reinterpret_cast<float *>(shared), *const grad_tile = q_tile + tile_floats;
  float *const k_tile = grad_tile + tile_floats, *const v_tile = k_tile + tile_floats;
  float *const grads = v_tile + tile_floats;
  TokenRange *const ranges = reinterpret_cast<TokenRange *>(grads + kF32Tile * kF32WeightPitch);

  const int head = blockIdx.x % shape.heads, first = static_cast<int>(blockIdx.x / shape.heads) * kF32Tile;
  const int own = threadIdx.x / kF32Tile, column = threadIdx.x % kF32Tile, row = min(first + own, shape.tokens - 1);
  load_tile_f32<DIM>(q_tile, operands.q.head(head), first, shape.tokens);
  load_tile_f32<DIM>(grad_tile, operands.grad.head(head), first, shape.tokens);
  if (column == 0) ranges[own] = keys_of(shape, row);
  __syncthreads();
  const Bounds block = bounds_of(ranges, kF32Tile);
  const TokenRange range = ranges[own];
  const float lse = operands.lse[static_cast<int64_t>(row) * shape.heads + head];
  const float delta = operands.delta[static_cast<int64_t>(row) * shape.heads + head];
  float dq[DIM / 64][4] = {};
  for (int key = block.begin; key < block.end; key += kF32Tile) {
    __syncthreads();
    load_tile_f32<DIM>(k_tile, operands.k.head(head / shape.group), key, shape.tokens);
    load_tile_f32<DIM>(v_tile, operands.v.head(head / shape.group), key, shape.tokens);
    __syncthreads();
    const float product = dot_f32<DIM>(q_tile + own * kF32Pitch<DIM>, k_tile + column * kF32Pitch<DIM>);
    const float dweight = dot_f32<DIM>(grad_tile + own * kF32Pitch<DIM>, v_tile + column * kF32Pitch<DIM>);
    const bool visible = key + column >= range.begin && key + column < range.end;
    grads[own * kF32WeightPitch + column] = PairF32(shape, product, dweight, lse, delta, visible).grad;
    __syncwarp();  // a row's threads are of one warp
    add_rows_f32<DIM>(dq, grads + own * kF32WeightPitch, k_tile);
  }
  if (first + own >= shape.tokens) return;
  store_sums_f32<DIM>(operands.dq.head(head), row, dq, range.begin < range.end ? 1.0f : NAN);
}

template <int DIM, class T>
__global__ void __launch_bounds__(kF32Threads)
    attention_key_grad_f32(const AttentionShape shape, const BackwardOperandsF32<T> operands) {
  constexpr int tile_floats = kF32Tile * kF32Pitch<DIM>;
  extern __shared__ __align__(1024) unsigned char shared[];
  float *const k_tile = reinterpret_cast<float *>(shared), *const v_tile = k_tile + tile_floats;
  float *const q_tile = v_tile + tile_floats, *const grad_tile = q_tile + tile_floats;
  float *const weights = grad_tile + tile_floats, *const grads = weights + kF32Tile * kF32WeightPitch;
  TokenRange *const ranges = reinterpret_cast<TokenRange *>(grads + kF32Tile * kF32WeightPitch);

  const int kv_head = blockIdx.x % shape.kv_heads, first = static_cast<int>(blockIdx.x / shape.kv_heads) * kF32Tile;
  const int own = threadIdx.x / kF32Tile, column = threadIdx.x % kF32Tile, row = min(first + own, shape.tokens - 1);
  load_tile_f32<DIM>(k_tile, operands.k.head(kv_head), first, shape.tokens);
  load_tile_f32<DIM>(v_tile, operands.v.head(kv_head), first, shape.tokens);
  if (column == 0) ranges[own] = queries_of(shape, row);
  __syncthreads();
  const Bounds block = bounds_of(ranges, kF32Tile);
  const TokenRange range = ranges[own];
  float dk[DIM / 64][4] = {}, dv[DIM / 64][4] = {};
  for (int head = kv_head * shape.group; head < (kv_head + 1) * shape.group; ++head) {
    for (int query = block.begin; query < block.end; query += kF32Tile) {
      __syncthreads();
      load_tile_f32<DIM>(q_tile, operands.q.head(head), query, shape.tokens);
      load_tile_f32<DIM>(grad_tile, operands.grad.head(head), query, shape.tokens);
      __syncthreads();
      const int64_t at = static_cast<int64_t>(min(query + column, shape.tokens - 1)) * shape.heads + head;
      const float product = dot_f32<DIM>(k_tile + own * kF32Pitch<DIM>, q_tile + column * kF32Pitch<DIM>);
      const float dweight = dot_f32<DIM>(v_tile + own * kF32Pitch<DIM>, grad_tile + column * kF32Pitch<DIM>);
      const bool visible = query + column >= range.begin && query + column < range.end;
      const PairF32 pair(shape, product, dweight, operands.lse[at], operands.delta[at], visible);
      weights[own * kF32WeightPitch + column] = pair.weight;
      grads[own * kF32WeightPitch + column] = pair.grad;
      __syncwarp();  // a row's threads are of one warp
      add_rows_f32<DIM>(dv, weights + own * kF32WeightPitch, grad_tile);
      add_rows_f32<DIM>(dk, grads + own * kF32WeightPitch, q_tile);
    }
  }
  if (first + own >= shape.tokens) return;
  const float factor = range.begin < range.end ? 1.0f : NAN;
  store_sums_f32<DIM>(operands.dk.head(kv_head), row, dk, factor);
  store_sums_f32<DIM>(operands.dv.head(kv_head), row, dv, factor);
}

// Shared memory of the key gradient, the larger of the two kernels.
template <int DIM>
constexpr size_t kBackwardBytesF32 = 4 * kF32TileBytes<DIM> + 2 * kF32WeightBytes + kF32Tile * sizeof(TokenRange);

template <int DIM, class T>
void start_backward_f32(const sg_call *call, const AttentionShape &shape, const BackwardOperandsF32<T> &operands) {
  launch(attention_key_grad_f32<DIM, T>, ceil_div(shape.tokens, kF32Tile) * shape.kv_heads, kF32Threads,
         kBackwardBytesF32<DIM>, stream(call), shape, operands);
  launch(attention_query_grad_f32<DIM, T>, ceil_div(shape.tokens, kF32Tile) * shape.heads, kF32Threads,
         kBackwardBytesF32<DIM> - kF32WeightBytes, stream(call), shape, operands);
}

}  // namespace sg::cuda

// gather_rows(x[T, D], rows[R]) -> y[R, D], and argmax(logits[R, V]) -> ids[R].
#include "best.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

// ---- gather_rows. Floor: the picked rows, read and written. A warp copies one segment of one row, all of its loads in
// flight at once. Bits are copied, not numbers; a row outside x gives NaN.

constexpr int kPacks = 4;

struct GatherShape {
  int64_t rows, picked, width;
  int64_t segments;  // of a row
};

template <int N, bool packed, class Bits>
__global__ void __launch_bounds__(kWarpTaskThreads)
    gather_kernel(GatherShape shape, const Bits *x, const int32_t *rows, Bits not_a_number, Bits *y) {
  wait_for_kernels_ahead();
  const int64_t task = warp_task(), entry = task / shape.segments;
  if (entry >= shape.picked) return;
  const int64_t column = task % shape.segments * (32 * N * kPacks) + lane_index() * N;
  const int64_t row = rows[entry];
  const bool known = row >= 0 && row < shape.rows;
  const Bits *from = x + (known ? row : 0) * shape.width + column;
  Bits *to = y + entry * shape.width + column;
  Pack<Bits, N> packs[kPacks];
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t left = shape.width - column - 32 * N * j;
#pragma unroll
    for (int k = 0; k < N; ++k) packs[j].at[k] = not_a_number;
    if (!known) continue;
    if (packed) {
      if (left > 0) packs[j] = load_pack<N>(from + 32 * N * j);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) packs[j].at[k] = k < left ? from[32 * N * j + k] : not_a_number;
    }
  }
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t left = shape.width - column - 32 * N * j;
    if (packed) {
      if (left > 0) store_bits(to + 32 * N * j, packs[j]);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (k < left) to[32 * N * j + k] = packs[j].at[k];
      }
    }
  }
}

template <class Bits>
void gather(const sg_call *call, Bits not_a_number) {
  constexpr int N = 16 / sizeof(Bits);
  const sg_tensor *x = input(call, 0), *rows = input(call, 1);
  const Bits *from = data<const Bits>(x);
  Bits *to = data<Bits>(output(call, 0));
  GatherShape shape{x->shape[0], rows->shape[0], x->shape[1], ceil_div(x->shape[1], 32 * N * kPacks)};
  const int32_t *picked = data<const int32_t>(rows);
  const unsigned blocks = warp_task_blocks(shape.picked * shape.segments);
  const bool packed = can_pack<N>(from, shape.width) && can_pack<N>(to, shape.width);
  const auto kernel = packed ? gather_kernel<N, true, Bits> : gather_kernel<N, false, Bits>;
  launch_ahead(call, blocks, kWarpTaskThreads, 0, kernel, shape, from, picked, not_a_number, to);
}

int32_t gather_supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *rows = input(call, 1), *y = output(call, 0);
  if (!x || !rows || !y || !all_dense(call) || x->rank != 2 || y->rank != 2 || rows->rank != 1) return 0;
  if (!is_activation(x) || x->dtype != y->dtype || rows->dtype != SG_I32 || x->shape[0] < 1) return 0;
  return y->shape[0] == rows->shape[0] && y->shape[1] == x->shape[1] ? 10 : 0;
}

int32_t gather_run(const sg_call *call) {
  if (num_elements(output(call, 0)) == 0) return SG_OK;
  if (input(call, 0)->dtype == SG_BF16) {
    gather<uint16_t>(call, 0x7fff);
  } else {
    gather<uint32_t>(call, 0x7fffffff);
  }
  return launched(call);
}

constexpr sg_kernel gather_entry = describe_kernel("gather_rows", "cuda", -1, gather_supports, nullptr, gather_run);
SG_REGISTER_KERNEL(gather_entry);

// ---- argmax. Floor: the logits, once. A block takes a piece of a row, so that one row already fills the device; a
// warp then compares the pieces of a row. NaN counts as -infinity, and of equal values the lowest index wins,
// whatever the order of comparisons.

constexpr int kArgmaxThreads = 256;
constexpr int kPiece = kArgmaxThreads * 32;  // elements

template <int N, bool packed, class T>
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_pieces(const T *logits, int64_t width, int64_t pieces, Best *found) {
  __shared__ Best of_warp[kArgmaxThreads / 32];
  const int64_t row = blockIdx.x / pieces, begin = blockIdx.x % pieces * kPiece + threadIdx.x * N;
  Best best = no_best();
#pragma unroll 4
  for (int i = 0; i < kPiece; i += kArgmaxThreads * N) {
    const int64_t column = begin + i, left = width - column;
    float values[N];
    load_within<N, packed>(logits + row * width + column, left, values);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const float value = values[k] == values[k] ? values[k] : -INFINITY;
      if (k < left) best = better(best, {value, static_cast<int32_t>(column + k)});
    }
  }
  best = warp_best(best);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  best = warp_best(threadIdx.x < kArgmaxThreads / 32 ? of_warp[threadIdx.x] : no_best());
  if (threadIdx.x == 0) found[blockIdx.x] = best;
}

__global__ void __launch_bounds__(kWarpTaskThreads)
    argmax_rows(const Best *found, int64_t rows, int64_t pieces, int32_t *ids) {
  const int64_t row = warp_task();
  if (row >= rows) return;
  Best best = no_best();
  for (int64_t piece = lane_index(); piece < pieces; piece += 32) best = better(best, found[row * pieces + piece]);
  best = warp_best(best);
  if (lane_index() == 0) ids[row] = best.index;
}

int64_t pieces_of_row(const sg_tensor *logits) { return ceil_div(logits->shape[1], kPiece); }

int32_t argmax_supports(const sg_call *call) {
  const sg_tensor *logits = input(call, 0), *ids = output(call, 0);
  if (!logits || !ids || !all_dense(call) || logits->rank != 2 || !is_activation(logits)) return 0;
  if (logits->shape[1] < 1 || logits->shape[1] > INT32_MAX) return 0;
  if (logits->shape[0] * pieces_of_row(logits) > INT32_MAX) return 0;
  return ids->dtype == SG_I32 && num_elements(ids) == logits->shape[0] ? 10 : 0;
}
size_t argmax_workspace(const sg_call *call) {
  const sg_tensor *logits = call->inputs[0];
  return static_cast<size_t>(logits->shape[0] * pieces_of_row(logits)) * sizeof(Best);
}

int32_t argmax_run(const sg_call *call) {
  const sg_tensor *logits = input(call, 0);
  const int64_t rows = logits->shape[0], width = logits->shape[1], pieces = pieces_of_row(logits);
  if (rows == 0) return SG_OK;
  Best *found = static_cast<Best *>(call->workspace);
  const auto blocks = static_cast<unsigned>(rows * pieces);
  with_type(logits, [&]<class T>(T) {
    constexpr int N = 16 / sizeof(T);
    const T *from = data<const T>(logits);
    if (can_pack<N>(from, width)) {
      argmax_pieces<N, true><<<blocks, kArgmaxThreads, 0, stream(call)>>>(from, width, pieces, found);
    } else {
      argmax_pieces<N, false><<<blocks, kArgmaxThreads, 0, stream(call)>>>(from, width, pieces, found);
    }
  });
  argmax_rows<<<warp_task_blocks(rows), kWarpTaskThreads, 0, stream(call)>>>(found, rows, pieces,
                                                                              data<int32_t>(output(call, 0)));
  return launched(call);
}

constexpr sg_kernel argmax_entry = describe_kernel("argmax", "cuda", -1, argmax_supports, argmax_workspace, argmax_run);
SG_REGISTER_KERNEL(argmax_entry);

}  // namespace
}  // namespace sg::cuda

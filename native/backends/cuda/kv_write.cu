// kv_write(k[T, H, D], v[T, H, Dv], slots[T]) -> key_cache[S, H, D], value_cache[S, H, Dv]: row slots[t] of the
// caches becomes row t, rounded to the cache's dtype. A slot that is negative or outside the caches is skipped. Rows
// of k, v and of the caches may lie apart.
//
// Floor: the rows, read and written. A warp copies one segment of one row, all of its loads in flight at once.
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kPacks = 2;

struct Shape {
  int64_t tokens, width;
  int64_t cache_rows;
  int64_t from_stride, to_stride;  // elements from row to row
  int64_t segments;                // of a row
};

template <int N, bool packed, class X, class Y>
__global__ void __launch_bounds__(kWarpTaskThreads)
    write_kernel(Shape shape, const X *rows, const int32_t *slots, Y *cache) {
  const int64_t task = warp_task(), token = task / shape.segments;
  if (token >= shape.tokens) return;
  const int64_t slot = slots[token];
  if (slot < 0 || slot >= shape.cache_rows) return;
  const int64_t first = task % shape.segments * (32 * N * kPacks) + lane_index() * N;
  float values[kPacks][N];
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t column = first + 32 * N * j;
    load_within<N, packed>(rows + token * shape.from_stride + column, shape.width - column, values[j]);
  }
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t column = first + 32 * N * j;
    store_within<N, packed>(cache + slot * shape.to_stride + column, shape.width - column, values[j]);
  }
}

void write_rows(const sg_call *call, const sg_tensor *rows, const sg_tensor *cache, int64_t cache_rows) {
  with_type(rows, [&]<class X>(X) {
    with_type(cache, [&]<class Y>(Y) {
      constexpr int N = pack_of<X, Y>();
      const X *from = data<const X>(rows);
      Y *to = data<Y>(cache);
      const int64_t width = rows->shape[1] * rows->shape[2];
      const Shape shape{rows->shape[0],   width, cache_rows, rows->strides[0], cache->strides[0],
                        ceil_div(width, 32 * N * kPacks)};
      if (shape.tokens * width == 0) return;
      const unsigned blocks = warp_task_blocks(shape.tokens * shape.segments);
      const int32_t *slots = data<const int32_t>(input(call, 2));
      if (width % N == 0 && can_pack<N>(from, shape.from_stride) && can_pack<N>(to, shape.to_stride)) {
        write_kernel<N, true><<<blocks, kWarpTaskThreads, 0, stream(call)>>>(shape, from, slots, to);
      } else {
        write_kernel<N, false><<<blocks, kWarpTaskThreads, 0, stream(call)>>>(shape, from, slots, to);
      }
    });
  });
}

bool fits(const sg_tensor *rows, const sg_tensor *cache) {
  if (!rows || !cache || rows->rank != 3 || cache->rank != 3) return false;
  if (!is_activation(rows) || !is_activation(cache)) return false;
  if (rows->shape[1] != cache->shape[1] || rows->shape[2] != cache->shape[2]) return false;
  return has_dense_rows(rows) && has_dense_rows(cache);
}

int32_t supports(const sg_call *call) {
  const sg_tensor *k = input(call, 0), *v = input(call, 1), *slots = input(call, 2);
  if (!fits(k, output(call, 0)) || !fits(v, output(call, 1)) || slots == nullptr) return 0;
  if (slots->dtype != SG_I32 || slots->rank != 1 || !is_dense(slots)) return 0;
  return slots->shape[0] == k->shape[0] && slots->shape[0] == v->shape[0] ? 10 : 0;
}

int32_t run(const sg_call *call) {
  const sg_tensor *key_cache = output(call, 0), *value_cache = output(call, 1);
  const int64_t rows = key_cache->shape[0] < value_cache->shape[0] ? key_cache->shape[0] : value_cache->shape[0];
  write_rows(call, input(call, 0), key_cache, rows);
  write_rows(call, input(call, 1), value_cache, rows);
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("kv_write", "cuda", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda

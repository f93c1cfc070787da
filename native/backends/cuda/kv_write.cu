// kv_write(k[T, H, D], v[T, H, Dv], slots[T]) -> key_cache[S, H, D], value_cache[S, H, Dv]: row slots[t] of the
// caches becomes row t, rounded to the cache's dtype. A slot that is negative or outside the caches is skipped. Rows
// of k, v and of the caches may lie apart.
//
// Floor: the rows, read and written. A warp copies one segment of one row, all of its loads in flight at once.
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kPacks = 2;

// Rows that are copied to a cache.
template <class X, class Y>
struct Copy {
  const X *rows = nullptr;
  Y *cache = nullptr;
  int64_t width = 0;
  int64_t from_stride = 0, to_stride = 0;  // elements from row to row
  int64_t segments = 0;                    // of a row
  int64_t blocks = 0;                      // that make it
};

// The first copy's blocks, and then the second's.
template <int N, bool packed, class X, class Y>
__global__ void __launch_bounds__(kWarpTaskThreads)
    write_kernel(Copy<X, Y> first, Copy<X, Y> second, int64_t tokens, int64_t cache_rows, const int32_t *slots) {
  wait_for_kernels_ahead();
  const bool is_first = blockIdx.x < first.blocks;
  const Copy<X, Y> copy = is_first ? first : second;
  const int64_t task = warp_task() - (is_first ? 0 : first.blocks * (kWarpTaskThreads / 32));
  const int64_t token = task / copy.segments;
  if (token >= tokens) return;
  const int64_t slot = slots[token];
  if (slot < 0 || slot >= cache_rows) return;
  const int64_t begin = task % copy.segments * (32 * N * kPacks) + lane_index() * N;
  float values[kPacks][N];
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t column = begin + 32 * N * j;
    load_within<N, packed>(copy.rows + token * copy.from_stride + column, copy.width - column, values[j]);
  }
#pragma unroll
  for (int j = 0; j < kPacks; ++j) {
    const int64_t column = begin + 32 * N * j;
    store_within<N, packed>(copy.cache + slot * copy.to_stride + column, copy.width - column, values[j]);
  }
}

template <int N, class X, class Y>
Copy<X, Y> copy_of(const sg_tensor *rows, const sg_tensor *cache) {
  const int64_t width = rows->shape[1] * rows->shape[2], segments = ceil_div(width, 32 * N * kPacks);
  return {data<const X>(rows),
          data<Y>(cache),
          width,
          rows->strides[0],
          cache->strides[0],
          segments,
          static_cast<int64_t>(warp_task_blocks(rows->shape[0] * segments))};
}

template <int N, class X, class Y>
bool packs(const Copy<X, Y> &copy) {
  return copy.width % N == 0 && can_pack<N>(copy.rows, copy.from_stride) && can_pack<N>(copy.cache, copy.to_stride);
}

// One kernel for both where their dtypes agree; `values` may be null.
void write_rows(const sg_call *call, const sg_tensor *keys, const sg_tensor *key_cache, const sg_tensor *values,
                const sg_tensor *value_cache, int64_t cache_rows) {
  with_type(keys, [&]<class X>(X) {
    with_type(key_cache, [&]<class Y>(Y) {
      constexpr int N = pack_of<X, Y>();
      const Copy<X, Y> first = copy_of<N, X, Y>(keys, key_cache);
      const Copy<X, Y> second = values == nullptr ? Copy<X, Y>() : copy_of<N, X, Y>(values, value_cache);
      const int64_t blocks = first.blocks + second.blocks;
      if (blocks == 0) return;
      const bool packed = packs<N>(first) && (values == nullptr || packs<N>(second));
      const auto kernel = packed ? write_kernel<N, true, X, Y> : write_kernel<N, false, X, Y>;
      launch_ahead(call, static_cast<unsigned>(blocks), kWarpTaskThreads, 0, kernel, first, second, keys->shape[0],
                   cache_rows, data<const int32_t>(input(call, 2)));
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
  const sg_tensor *k = input(call, 0), *v = input(call, 1);
  if (k->dtype == v->dtype && key_cache->dtype == value_cache->dtype) {
    write_rows(call, k, key_cache, v, value_cache, rows);
  } else {
    write_rows(call, k, key_cache, nullptr, nullptr, rows);
    write_rows(call, v, value_cache, nullptr, nullptr, rows);
  }
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("kv_write", "cuda", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda

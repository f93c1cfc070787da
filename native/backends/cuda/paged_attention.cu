// paged_attention: o[T, Hq, Dv] of tokens that attend to the cached keys and values of their sequence.
//
// A block makes one head of one token, so that a token's result depends on the token, its position and the cache
// alone. It walks the visible keys in tiles of kKeys: eight lanes make one dot product, each thread then holds one
// logit of the tile, and in the sum over values each thread owns some of the dimensions. Floor: the cached rows that
// a token sees, once for every group of heads; this plain kernel reads them once for every head and leaves it to the
// caches that heads share.
//
// A sequence, position or cache block outside its table gives a row of NaN; a negative sequence (padding) gives 0.
#include "paged_attention.h"

#include "paged_attention.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kKeys = kThreads;  // of a tile
constexpr int kLanesPerKey = 8;

// Maximum over the block; every thread gets it. `scratch` holds a float a warp, and is free for the next call at once.
__device__ inline float block_max(float value, float *scratch) {
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  float most = scratch[0];
#pragma unroll
  for (int i = 1; i < kThreads / 32; ++i) most = fmaxf(most, scratch[i]);
  return most;
}

// logits[i] of the tile's keys, i < count; NaN for a key that has no row.
template <bool packed, class C>
__device__ inline void make_logits(const PagedProblem &p, const float *q, const C *keys, const int64_t *rows, int count,
                                   float *logits) {
  const int lane = threadIdx.x % kLanesPerKey;
  for (int first = 0; first < count; first += kThreads / kLanesPerKey) {
    const int i = first + threadIdx.x / kLanesPerKey;
    const int64_t row = i < count ? rows[i] : -1;
    float sum = 0.0f;
    for (int d = 8 * lane; row >= 0 && d < p.head_dim; d += 8 * kLanesPerKey) {
      float key[8];
      load_within<8, packed>(keys + row * p.key_stride + d, p.head_dim - d, key);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (packed || d + k < p.head_dim) sum = fmaf(q[d + k], key[k], sum);
      }
    }
#pragma unroll
    for (int offset = kLanesPerKey / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    float logit = p.scale * sum;
    if (p.softcap > 0.0f) logit = p.softcap * tanhf(logit / p.softcap);
    if (lane == 0 && i < count) logits[i] = row >= 0 ? logit : not_a_number();
  }
}

template <bool packed, class T, class C>
__global__ void __launch_bounds__(kThreads)
    paged_attention_kernel(PagedProblem p, PagedIndices indices, const T *q, const C *key_cache, const C *value_cache,
                           T *o) {
  extern __shared__ float shared[];
  float *query = shared, *sum = query + p.head_dim;  // sum[d] belongs to thread d % kThreads
  __shared__ float weights[kKeys], scratch[32];
  __shared__ int64_t rows[kKeys];
  const int64_t token = blockIdx.x;
  const int head = blockIdx.y, kv_head = head / p.group;
  o += token * p.o_stride + static_cast<int64_t>(head) * p.value_dim;
  const int64_t sequence = indices.sequence_ids[token], position = indices.positions[token];
  const bool known = sequence < p.sequences && position >= 0 && position < p.max_blocks * p.block_size;
  if (sequence < 0 || !known) {
    const float value = sequence < 0 ? 0.0f : not_a_number();
    for (int d = threadIdx.x; d < p.value_dim; d += kThreads) o[d] = from_float<T>(value);
    return;
  }
  const int32_t *table = indices.block_tables + sequence * p.max_blocks;
  q += token * p.q_stride + static_cast<int64_t>(head) * p.head_dim;
  const C *keys = key_cache + static_cast<int64_t>(kv_head) * p.head_dim;
  const C *values = value_cache + static_cast<int64_t>(kv_head) * p.value_dim;
  for (int d = threadIdx.x; d < p.head_dim; d += kThreads) query[d] = to_float(q[d]);
  for (int d = threadIdx.x; d < p.value_dim; d += kThreads) sum[d] = 0.0f;

  float peak = -INFINITY, total = 0.0f;
  const int64_t first = p.window > 0 && position >= p.window ? position - p.window + 1 : 0;
  for (int64_t begin = first; begin <= position; begin += kKeys) {
    const int count = position + 1 - begin < kKeys ? static_cast<int>(position + 1 - begin) : kKeys;
    if (threadIdx.x < count) rows[threadIdx.x] = cache_row(p, table, begin + threadIdx.x);
    __syncthreads();
    make_logits<packed>(p, query, keys, rows, count, weights);
    __syncthreads();
    const float logit = threadIdx.x < count ? weights[threadIdx.x] : -INFINITY;
    const float new_peak = fmaxf(peak, block_max(logit, scratch));
    const float weight = threadIdx.x < count ? expf(logit - new_peak) : 0.0f;
    const float shrink = expf(peak - new_peak);
    weights[threadIdx.x] = weight;
    total = fmaf(total, shrink, block_sum(weight, scratch));
    peak = new_peak;
    __syncthreads();
    for (int d = threadIdx.x; d < p.value_dim; d += kThreads) {
      float of_tile = 0.0f;
#pragma unroll 8
      for (int i = 0; i < count; ++i) {
        const int64_t row = rows[i] < 0 ? 0 : rows[i];  // its weight is NaN
        of_tile = fmaf(weights[i], to_float(values[row * p.value_stride + d]), of_tile);
      }
      sum[d] = fmaf(sum[d], shrink, of_tile);
    }
    __syncthreads();
  }
  for (int d = threadIdx.x; d < p.value_dim; d += kThreads) o[d] = from_float<T>(sum[d] / total);
}

int32_t supports(const sg_call *call) { return paged_supported(call) ? 10 : 0; }

template <class T, class C>
void launch(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *k = input(call, 1);
  const PagedProblem p = paged_problem(call);
  const PagedIndices indices = paged_indices(call);
  const C *keys = data<const C>(k), *values = data<const C>(input(call, 2));
  const dim3 grid(static_cast<unsigned>(q->shape[0]), static_cast<unsigned>(p.heads));
  const size_t shared = static_cast<size_t>(p.head_dim + p.value_dim) * sizeof(float);
  const bool packed = p.head_dim % 8 == 0 && can_pack<8>(keys, p.key_stride);
  const auto kernel = packed ? paged_attention_kernel<true, T, C> : paged_attention_kernel<false, T, C>;
  kernel<<<grid, kThreads, shared, stream(call)>>>(p, indices, data<const T>(q), keys, values,
                                                   data<T>(output(call, 0)));
}

constexpr sg_kernel describe() {
  sg_kernel kernel = describe_kernel("paged_attention", "cuda", -1, supports, nullptr, run_paged_attention);
  kernel.traits |= SG_TRAIT_ROW_INVARIANT;  // a block makes one head of one token
  return kernel;
}
constexpr sg_kernel kernel = describe();
SG_REGISTER_KERNEL(kernel);

}  // namespace

int32_t run_paged_attention(const sg_call *call) {
  if (num_elements(output(call, 0)) == 0) return SG_OK;
  with_type(input(call, 0), [&]<class T>(T) {
    with_type(input(call, 1), [&]<class C>(C) { launch<T, C>(call); });
  });
  return launched(call);
}

}  // namespace sg::cuda

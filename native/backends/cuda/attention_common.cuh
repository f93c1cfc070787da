// What the attention kernels share, forward and backward: the call as they read it, what they take, documents and
// masks.
#pragma once

#include <algorithm>
#include <climits>

#include "kernel.cuh"

namespace sg::cuda {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;
constexpr int kAttentionThreads = 128;  // of a block of the bf16 kernels: four warps
constexpr int kMaxTiledHeadDim = 256;  // of the kernels that multiply bf16 tiles
constexpr int kMaxHeadDim = 512;

struct AttentionShape {
  int tokens, heads, kv_heads, group;
  int causal, window;
  float scale, softcap;
  float logit_factor;  // logits in base 2 are this times the product q.k, or times its capped tangent
  float tanh_factor;   // 0: logits are not capped
  const int32_t *doc_starts;
  int num_starts;

  AttentionShape(const sg_call *call, const sg_tensor *q, const sg_tensor *k, const sg_tensor *starts) {
    tokens = static_cast<int>(q->shape[0]);
    heads = static_cast<int>(q->shape[1]);
    kv_heads = static_cast<int>(k->shape[1]);
    group = heads / kv_heads;
    causal = static_cast<int>(attr_int(call, "causal", 1));
    window = static_cast<int>(std::min<int64_t>(attr_int(call, "window", 0), 1 << 30));
    scale = static_cast<float>(attr_float(call, "scale", 0.0));
    softcap = static_cast<float>(attr_float(call, "softcap", 0.0));
    logit_factor = (softcap > 0.0f ? softcap : scale) * kLog2e;
    tanh_factor = softcap > 0.0f ? scale / softcap : 0.0f;
    doc_starts = data<const int32_t>(starts);
    num_starts = static_cast<int>(starts->shape[0]);
  }
};

// One head of [tokens, heads, dim]; tokens are `stride` elements apart.
template <class T>
struct HeadRows {
  T *base;
  int64_t stride;
  int dim;
  bool packs;  // rows can be moved 16 bytes at a time

  explicit HeadRows(const sg_tensor *t)
      : base(static_cast<T *>(t->data)), stride(t->strides[0]), dim(static_cast<int>(t->shape[2])) {
    constexpr int pack = 16 / sizeof(T);
    packs = reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride % pack == 0 && dim % pack == 0;
  }
  __device__ HeadRows head(int index) const {
    HeadRows result = *this;
    result.base += static_cast<int64_t>(index) * dim;
    return result;
  }
  __device__ T *row(int token) const { return base + token * stride; }
};

inline bool is_lse(const sg_tensor *t, const sg_tensor *q) {
  return t != nullptr && t->dtype == SG_F32 && t->rank == 2 && t->shape[0] == q->shape[0] &&
         t->shape[1] == q->shape[1] && is_dense(t);
}
inline bool is_heads(const sg_tensor *t, int32_t dtype) {
  return t != nullptr && t->rank == 3 && t->dtype == dtype && has_dense_rows(t);
}

// What attention and attention_grad ask of q, k, v and doc_starts.
inline bool attention_supported(const sg_call *call, const sg_tensor *q, const sg_tensor *k, const sg_tensor *v,
                                const sg_tensor *starts) {
  if (q == nullptr || !is_activation(q)) return false;
  if (!is_heads(q, q->dtype) || !is_heads(k, q->dtype) || !is_heads(v, q->dtype)) return false;
  if (starts == nullptr || starts->dtype != SG_I32 || starts->rank != 1 || !is_dense(starts)) return false;
  if (k->shape[0] != q->shape[0] || v->shape[0] != q->shape[0]) return false;
  if (k->shape[1] < 1 || v->shape[1] != k->shape[1] || q->shape[1] % k->shape[1] != 0) return false;
  if (k->shape[2] != q->shape[2] || std::min(q->shape[2], v->shape[2]) < 1) return false;
  if (std::max(q->shape[2], v->shape[2]) > kMaxHeadDim) return false;
  if (q->shape[0] >= (1 << 28) || ceil_div(q->shape[0], 16) * q->shape[1] > INT_MAX || starts->shape[0] > INT_MAX) {
    return false;
  }
  return attr_float(call, "scale", 0.0) > 0.0 && attr_int(call, "window", 0) >= 0;
}

// body(std::integral_constant<int, D>{}) with the smallest size of tile that takes heads of `dim`.
template <class Body>
inline void with_head_dim(int64_t dim, Body &&body) {
  if (dim <= 64) {
    body(std::integral_constant<int, 64>{});
  } else if (dim <= 128) {
    body(std::integral_constant<int, 128>{});
  } else if (dim <= 256) {
    body(std::integral_constant<int, 256>{});
  } else {
    body(std::integral_constant<int, 512>{});
  }
}

// Tokens [begin, end). A token of no document sees none: begin is then the number of tokens, end 0.
struct TokenRange {
  int begin, end;
};

__device__ inline TokenRange document_of(const AttentionShape &a, int token) {
  int low = 0, high = a.num_starts;  // the first start past the token is in [low, high]
  while (low < high) {
    const int middle = (low + high) / 2;
    if (a.doc_starts[middle] <= token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == 0 || low == a.num_starts) return {a.tokens, 0};
  return {max(a.doc_starts[low - 1], 0), min(a.doc_starts[low], a.tokens)};
}
// The keys that a query sees.
__device__ inline TokenRange keys_of(const AttentionShape &a, int token) {
  TokenRange range = document_of(a, token);
  if (range.end == 0) return range;
  if (a.window > 0) range.begin = max(range.begin, token - a.window + 1);
  if (a.window > 0) range.end = min(range.end, token + a.window);
  if (a.causal) range.end = token + 1;
  return range;
}
// The queries that see a key.
__device__ inline TokenRange queries_of(const AttentionShape &a, int token) {
  TokenRange range = document_of(a, token);
  if (range.end == 0) return range;
  if (a.window > 0) range.begin = max(range.begin, token - a.window + 1);
  if (a.window > 0) range.end = min(range.end, token + a.window);
  if (a.causal) range.begin = token;
  return range;
}

// What a set of rows sees: some of them see [begin, end), all of them see [full_begin, full_end).
struct Bounds {
  int begin, end, full_begin, full_end;
  __device__ bool touch(int first, int count) const { return first < end && first + count > begin; }
  __device__ bool cover(int first, int count) const { return first >= full_begin && first + count <= full_end; }
};

// Of `rows` rows whose ranges are in shared memory. Called by whole warps; every lane gets it.
__device__ inline Bounds bounds_of(const TokenRange *ranges, int rows) {
  Bounds bounds = {INT_MAX, 0, 0, INT_MAX};
  for (int i = static_cast<int>(threadIdx.x) % 32; i < rows; i += 32) {
    const TokenRange range = ranges[i];
    bounds.begin = min(bounds.begin, range.begin);
    bounds.end = max(bounds.end, range.end);
    bounds.full_begin = max(bounds.full_begin, range.begin);
    bounds.full_end = min(bounds.full_end, range.end);
  }
  bounds.begin = __reduce_min_sync(0xffffffffu, bounds.begin);
  bounds.end = __reduce_max_sync(0xffffffffu, bounds.end);
  bounds.full_begin = __reduce_max_sync(0xffffffffu, bounds.full_begin);
  bounds.full_end = __reduce_min_sync(0xffffffffu, bounds.full_end);
  return bounds;
}

// Starts a kernel whose blocks need `shared` bytes of shared memory, more than the default of 48 KiB included; caches
// get what the most blocks that fit a multiprocessor leave.
template <class... Parameters, class... Arguments>
inline void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared, cudaStream_t stream,
                   Arguments... arguments) {
  if (shared > 0) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  kernel<<<static_cast<unsigned>(blocks), threads, shared, stream>>>(arguments...);
}

}  // namespace sg::cuda

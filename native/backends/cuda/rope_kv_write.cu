// rope_kv_write(q[T, Hq, D], k[T, H, D], v[T, H, Dv], positions[T], table[P, R/2, 2], slots[T]) -> rotated[T, Hq, D],
// key_cache[S, H, D], value_cache[S, H, Dv]: q is rotated, k is rotated into row slots[t] of one cache, v copied into that
// of the other. Rows of q, k, v, rotated and of the caches may lie apart, and rotated may be q. A position outside the
// table gives NaN; a slot that is negative or outside the caches is skipped.
//
// The floor is bytes: q, k and v once in and once out. Where sequences go on by a token each that is next to nothing, and
// what counts is that this is one kernel. A thread has V pairs of one head, or two packs of a head of v, under way before it
// waits for position and slot; blocks have an axis for each of lane, head and token, so that no thread divides.
#include <algorithm>

#include "rope.cuh"
#include "rows.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 65535;  // along the grid's second and third axis
constexpr int kMostTokens = 64;     // of a block: its third axis holds no more

struct Shape {
  int64_t tokens, table_rows, cache_rows;
  int query_heads, heads;  // heads: of keys, and of values
  int dim, value_dim, half;
  int turning;      // threads that a head needs for its pairs
  int threads;      // the same, with those that copy dims past R
  int value_packs;  // of a head of v
};

template <class T, class C>
struct Tensors {
  Rows<const T> q, k, v;
  Rows<T> rotated;
  Rows<C> keys, values;
};

// A head that is turned, from `in` to `out`.
template <int V, bool interleaved, class X, class Y>
__device__ inline void turn_head(const Shape &shape, const Pack<X, V> &left, const Pack<X, V> &right, bool turns,
                                 const float *table, int32_t position, int lane, Y *out, int right_at) {
  float a[V], b[V];
  to_floats<V>(left, a);
  if (turns) {
    float cos[V], sin[V];
    load_angles<V>(table, shape.table_rows, shape.half, position, lane * V, 1.0f, cos, sin);
    to_floats<V>(right, b);
    turn<V, interleaved>(cos, sin, a, b);
    store<V>(out + right_at, b);
  }
  store<V>(out, a);
}

template <class T, class C, int V, bool interleaved>
__global__ void __launch_bounds__(kThreads)
    rope_kv_write_kernel(Shape shape, Tensors<T, C> at, const int32_t *positions, const float *table,
                         const int32_t *slots) {
  wait_for_kernels_ahead();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  const int head = static_cast<int>(blockIdx.y * blockDim.y + threadIdx.y);
  const int lane = static_cast<int>(blockIdx.z * blockDim.x + threadIdx.x);
  const bool is_query = head < shape.query_heads;
  const bool is_value = head >= shape.query_heads + shape.heads;
  const int own_head = is_query ? head : (head - shape.query_heads) - (is_value ? shape.heads : 0);
  // Two packs of a head: those whose pairs a thread turns, or of v one from each half of it. What lies behind the pairs
  // of a head takes the first pack of threads of its own.
  const bool turns = !is_value && lane < shape.turning;
  const int apart = (shape.value_packs + 1) / 2;
  const int left_at = is_value ? lane * V
                      : turns  ? lane * V * (interleaved ? 2 : 1)
                               : 2 * shape.half + (lane - shape.turning) * V;
  const int right_at = is_value ? apart * V : interleaved ? V : shape.half;  // from there on
  const bool exists = token < shape.tokens && head < shape.query_heads + 2 * shape.heads;
  const bool has_left = exists && lane < (is_value ? apart : shape.threads);
  const bool has_right = has_left && (is_value ? apart + lane < shape.value_packs : turns);
  const Rows<const T> &from = is_query ? at.q : is_value ? at.v : at.k;
  const int dim = is_value ? shape.value_dim : shape.dim;
  const int64_t first = static_cast<int64_t>(own_head) * dim + left_at;
  const T *in = from.data + token * from.stride + first;
  Pack<T, V> left{}, right{};
  if (has_left) left = load_pack<V>(in);
  if (has_right) right = load_pack<V>(in + right_at);
  __syncwarp();  // or the compiler may load position and slot first, and wait for them
  if (!has_left) return;
  if (is_query) {
    T *out = at.rotated.data + token * at.rotated.stride + first;
    turn_head<V, interleaved>(shape, left, right, turns, table, positions[token], lane, out, right_at);
    return;
  }
  const int64_t slot = slots[token];
  if (slot < 0 || slot >= shape.cache_rows) return;
  if (!is_value) {
    C *out = at.keys.data + slot * at.keys.stride + first;
    turn_head<V, interleaved>(shape, left, right, turns, table, positions[token], lane, out, right_at);
    return;
  }
  C *out = at.values.data + slot * at.values.stride + first;
  float values[V];
  to_floats<V>(left, values);
  store<V>(out, values);
  if (!has_right) return;
  to_floats<V>(right, values);
  store<V>(out + right_at, values);
}

template <int V, class T, class C>
void launch(const sg_call *call, Shape shape, const Tensors<T, C> &at) {
  shape.turning = shape.half / V;
  shape.threads = shape.turning + (shape.dim - 2 * shape.half) / V;
  shape.value_packs = shape.value_dim / V;
  const int64_t heads = shape.query_heads + 2 * shape.heads;
  const int64_t threads = std::max(shape.threads, (shape.value_packs + 1) / 2);
  if (shape.tokens * heads * threads == 0) return;
  const int64_t lanes = std::min<int64_t>(threads, kThreads), along = std::min(heads, kThreads / lanes);
  const int64_t tokens = std::min<int64_t>(kThreads / (lanes * along), kMostTokens);
  const dim3 block(static_cast<unsigned>(lanes), static_cast<unsigned>(along), static_cast<unsigned>(tokens));
  const dim3 blocks(static_cast<unsigned>(ceil_div(shape.tokens, tokens)),
                    static_cast<unsigned>(ceil_div(heads, along)), static_cast<unsigned>(ceil_div(threads, lanes)));
  const int32_t *positions = data<const int32_t>(input(call, 3)), *slots = data<const int32_t>(input(call, 5));
  const float *table = data<const float>(input(call, 4));
  const auto go = [&](auto kernel) {
    launch_ahead(call, blocks, block, 0, kernel, shape, at, positions, table, slots);
  };
  if (attr_int(call, "interleaved", 0) != 0) {
    go(rope_kv_write_kernel<T, C, V, true>);
  } else {
    go(rope_kv_write_kernel<T, C, V, false>);
  }
}

// [rows, heads, dim] with dense heads; rows may lie apart.
bool is_heads(const sg_tensor *t) {
  return t != nullptr && t->rank == 3 && is_activation(t) && has_packable_rows(t) && t->shape[2] > 0;
}
bool is_index(const sg_tensor *t, int64_t count) {
  return t != nullptr && t->dtype == SG_I32 && t->rank == 1 && is_dense(t) && t->shape[0] == count;
}
bool same_heads(const sg_tensor *a, const sg_tensor *b) {
  return a->shape[1] == b->shape[1] && a->shape[2] == b->shape[2];
}

int32_t supports(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *k = input(call, 1), *v = input(call, 2), *table = input(call, 4);
  const sg_tensor *rotated = output(call, 0), *keys = output(call, 1), *values = output(call, 2);
  if (!is_heads(q) || !is_heads(k) || !is_heads(v) || !is_heads(rotated) || !is_heads(keys) || !is_heads(values)) return 0;
  if (k->dtype != q->dtype || v->dtype != q->dtype || rotated->dtype != q->dtype || keys->dtype != values->dtype) return 0;
  if (!same_shape(q, rotated) || !same_heads(k, keys) || !same_heads(v, values)) return 0;
  if (k->shape[0] != q->shape[0] || v->shape[0] != q->shape[0] || k->shape[2] != q->shape[2]) return 0;
  if (v->shape[1] != k->shape[1] || q->shape[0] > INT32_MAX) return 0;
  if (!is_index(input(call, 3), q->shape[0]) || !is_index(input(call, 5), q->shape[0])) return 0;
  if (table == nullptr || table->dtype != SG_F32 || !is_dense(table)) return 0;
  if (table->rank != 3 || table->shape[2] != 2 || 2 * table->shape[1] > q->shape[2]) return 0;
  if (q->shape[1] + 2 * k->shape[1] > kMostBlocks || q->shape[2] > kMostBlocks || v->shape[2] > kMostBlocks) return 0;
  return 10;
}

template <class T, class C>
void run_with(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *k = input(call, 1), *v = input(call, 2), *table = input(call, 4);
  const sg_tensor *keys = output(call, 1), *values = output(call, 2);
  const int64_t key_width = k->shape[1] * k->shape[2], value_width = v->shape[1] * v->shape[2];
  const Shape shape{q->shape[0],
                    table->shape[0],
                    std::min(keys->shape[0], values->shape[0]),
                    static_cast<int>(q->shape[1]),
                    static_cast<int>(k->shape[1]),
                    static_cast<int>(q->shape[2]),
                    static_cast<int>(v->shape[2]),
                    static_cast<int>(table->shape[1]),
                    0,
                    0,
                    0};
  const Tensors<T, C> at{rows_of<const T>(q, q->shape[1] * q->shape[2]), rows_of<const T>(k, key_width),
                         rows_of<const T>(v, value_width),
                         rows_of<T>(output(call, 0), q->shape[1] * q->shape[2]),
                         rows_of<C>(keys, key_width), rows_of<C>(values, value_width)};
  constexpr int V = 16 / static_cast<int>(sizeof(T));
  const bool packs = shape.half % V == 0 && shape.dim % V == 0 && shape.value_dim % V == 0 && can_pack_rows<V>(at.q) &&
                     can_pack_rows<V>(at.k) && can_pack_rows<V>(at.v) && can_pack_rows<V>(at.rotated) &&
                     can_pack_rows<V>(at.keys) && can_pack_rows<V>(at.values) &&
                     can_pack<4>(data<const float>(table), 0);
  if (packs) {
    launch<V>(call, shape, at);
  } else {
    launch<1>(call, shape, at);
  }
}

int32_t run(const sg_call *call) {
  with_type(input(call, 0), [&]<class T>(T) {
    with_type(output(call, 1), [&]<class C>(C) { run_with<T, C>(call); });
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("rope_kv_write", "cuda", 0, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda

// rope_kv_write(q[T, Hq, D], k[T, H, D], v[T, H, Dv], positions[T], table[P, R/2, 2], slots[T], q_weight[D]?,
// k_weight[D]?) -> rotated[T, Hq, D], key_cache[S, H, D], value_cache[S, H, Dv]: q is rotated, k is rotated into row
// slots[t] of one cache, v copied into that of the other; with weights each head of q and k goes through its norm
// first. Rows of q, k, v, rotated and of the caches may lie apart, and rotated may be q. A position outside the table
// gives NaN; a slot that is negative or outside the caches is skipped.
//
// The floor is bytes: q, k and v once in and once out. Where sequences go on by a token each that is next to nothing,
// and what counts is that this is one kernel. A thread has V pairs of one head, or two packs of a head of v, under way
// before it waits for position and slot; blocks have an axis for each of lane, head and token, so that no thread
// divides. Positions, slots, angles and norms that nothing writes are read before the kernels ahead have ended. The
// lanes of a head that has a norm are a power of two of one warp, which add up its squares among them; angles and
// weight are under way by then. Heads of more lanes than a warp has are read twice, by a block each.
//
// Where tokens are many, a prompt's, it is bytes after all, and what holds them up is how long a thread lives: from its
// first load to its last store it has room for others in the queue to memory only with what it has asked for. There a
// thread has the same lane of several heads of q, of k or of v of one token, all of them under way at once, and reads
// angles and weight once for all. Bits are those of the other kernel.
#include <algorithm>
#include <bit>

#include "bits.cuh"
#include "norm_weight.cuh"
#include "rope.cuh"
#include "rows.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 65535;  // along the grid's second and third axis
constexpr int kMostTokens = 64;     // of a block: its third axis holds no more
constexpr int kManyTokens = 512;
constexpr int kManyHeads = 4;  // of a token, in one thread where tokens are many
constexpr int kManyThreads = 256;

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

struct Indices {
  const int32_t *positions, *slots;
  const float *table;
  bool fixed;  // nothing writes these while programs run
};

struct Norms {
  Weight q, k;
  float eps, inverse_dim;

  __device__ float rstd(float squares) const { return rsqrtf(fmaf(squares, inverse_dim, eps)); }
};

// Two packs of a head: those whose pairs a lane turns, or of v one from each half of it. What lies behind the pairs of
// a head takes the first pack of lanes of its own.
template <int V, bool interleaved>
struct Part {
  bool is_query, is_value, turns, has_left, has_right;
  int lane, left_at, right_at;  // right_at: from left_at on
  int64_t first;                // left_at, in the row of all heads

  __device__ Part(const Shape &shape, bool exists, int head, int own_lane) : lane(own_lane) {
    is_query = head < shape.query_heads;
    is_value = head >= shape.query_heads + shape.heads;
    const int own_head = is_query ? head : (head - shape.query_heads) - (is_value ? shape.heads : 0);
    turns = !is_value && lane < shape.turning;
    const int apart = (shape.value_packs + 1) / 2;
    left_at = is_value ? lane * V
              : turns  ? lane * V * (interleaved ? 2 : 1)
                       : 2 * shape.half + (lane - shape.turning) * V;
    right_at = is_value ? apart * V : interleaved ? V : shape.half;
    has_left = exists && lane < (is_value ? apart : shape.threads);
    has_right = has_left && (is_value ? apart + lane < shape.value_packs : turns);
    first = static_cast<int64_t>(own_head) * (is_value ? shape.value_dim : shape.dim) + left_at;
  }
  template <class T, class C>
  __device__ const T *source(const Tensors<T, C> &at, int64_t token) const {
    const Rows<const T> &from = is_query ? at.q : is_value ? at.v : at.k;
    return from.data + token * from.stride + first;
  }
  template <class Y>
  __device__ void store_to(const Rows<Y> &to, int64_t row, const float (&left)[V], const float (&right)[V]) const {
    Y *out = to.data + row * to.stride + first;
    store<V>(out, left);
    if (has_right) store<V>(out + right_at, right);
  }
};

// What a token's position and slot say.
template <int V>
struct Found {
  int32_t position = 0, slot = 0;
  float cos[V], sin[V];

  template <bool interleaved>
  __device__ void load_indices(const Part<V, interleaved> &part, const Indices &indices, int64_t token) {
    if (!part.is_query) slot = indices.slots[token];
    if (part.turns) position = indices.positions[token];
  }
  template <bool interleaved>
  __device__ void load_turn(const Shape &shape, const Part<V, interleaved> &part, const Indices &indices) {
    if (!part.turns) return;
    use_from_here(position);
    load_angles<V>(indices.table, shape.table_rows, shape.half, position, part.lane * V, 1.0f, cos, sin);
  }
};

// The weight of a norm for a thread's two packs.
template <int V>
struct Factors {
  float left[V], right[V];

  template <bool interleaved>
  __device__ void load(const Norms &norms, const Part<V, interleaved> &part) {
    Weight weight = norms.q;
    if (!part.is_query) weight = norms.k;
    weight.load_packs<V>(part.left_at, part.right_at, part.has_right ? 2 : 1, left, right);
  }
  __device__ void apply(float rstd, float (&a)[V], float (&b)[V]) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      a[i] *= rstd * left[i];
      b[i] *= rstd * right[i];
    }
  }
};

// The sum over all lanes of a head, which are a power of two of one warp; all of the warp call it.
template <int V>
__device__ inline float squares_of_lanes(const float (&a)[V], const float (&b)[V]) {
  float squares = 0.0f, more = 0.0f;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    squares = fmaf(a[i], a[i], squares);
    more = fmaf(b[i], b[i], more);
  }
  squares += more;
  for (int offset = static_cast<int>(blockDim.x) / 2; offset > 0; offset /= 2) {
    squares += __shfl_xor_sync(0xffffffffu, squares, offset);
  }
  return squares;
}

// Turns what is of q or k, and stores it where it belongs.
template <int V, bool interleaved, class T, class C>
__device__ inline void finish(const Shape &shape, const Tensors<T, C> &at, const Part<V, interleaved> &part,
                              int64_t token, const Found<V> &found, float (&left)[V], float (&right)[V]) {
  if (!part.is_query && (found.slot < 0 || found.slot >= shape.cache_rows)) return;
  if (part.turns) turn<V, interleaved>(found.cos, found.sin, left, right);
  if (part.is_query) {
    part.store_to(at.rotated, token, left, right);
  } else {
    part.store_to(part.is_value ? at.values : at.keys, found.slot, left, right);
  }
}

template <class T, class C, int V, bool interleaved, bool normed>
__global__ void __launch_bounds__(kThreads, normed ? 4 : 5)
    rope_kv_write_kernel(Shape shape, Tensors<T, C> at, Indices indices, Norms norms) {
  bring_kernel_behind();
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  const int head = static_cast<int>(blockIdx.y * blockDim.y + threadIdx.y);
  const bool exists = token < shape.tokens && head < shape.query_heads + 2 * shape.heads;
  const Part<V, interleaved> part(shape, exists, head, static_cast<int>(blockIdx.z * blockDim.x + threadIdx.x));
  const bool has_norm = normed && part.has_left && !part.is_value;
  Found<V> found;
  Factors<V> factors;
  const auto find = [&] {
    if (part.has_left) found.load_indices(part, indices, token);
    if constexpr (normed) {
      if (has_norm) factors.load(norms, part);
    }
    if (part.has_left) found.load_turn(shape, part, indices);
  };
  if (indices.fixed) find();
  wait_for_kernels_ahead();
  const T *in = part.source(at, token);
  Bits<T, V> left_bits, right_bits;
  if (part.has_left) left_bits.load(in);
  if (part.has_right) right_bits.load(in + part.right_at);
  __syncwarp();  // or the compiler may load position and slot first, and wait for them
  if (!indices.fixed) find();
  float left[V], right[V];
  left_bits.floats(left);
  right_bits.floats(right);
  if constexpr (normed) {
    const float rstd = norms.rstd(squares_of_lanes<V>(left, right));
    if (has_norm) factors.apply(rstd, left, right);
  }
  if (part.has_left) finish(shape, at, part, token, found, left, right);
}

// Up to N heads that follow one another, all of q, of k or of v.
template <int N>
struct Group {
  int head, heads;  // the first, of all; zero heads or fewer where there is no such group

  __device__ Group(const Shape &shape, int group) {
    const int of_q = count(shape.query_heads), of_each = count(shape.heads);
    int first = 0, end = shape.query_heads;
    if (group >= of_q) {
      const bool is_value = group >= of_q + of_each;
      group -= of_q + (is_value ? of_each : 0);
      first = end + (is_value ? shape.heads : 0);
      end = first + shape.heads;
    }
    head = first + group * N;
    heads = min(end - head, N);
  }
  __host__ __device__ static int count(int heads) { return (heads + N - 1) / N; }
};

template <class T, class C, int V, bool interleaved, bool normed, int N>
__global__ void __launch_bounds__(kManyThreads, normed ? 2 : 3)
    rope_kv_write_many(Shape shape, Tensors<T, C> at, Indices indices, Norms norms, int table_share) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  const Group<N> group(shape, static_cast<int>(blockIdx.y * blockDim.y + threadIdx.y));
  const int heads = token < shape.tokens ? group.heads : 0;
  const Part<V, interleaved> part(shape, heads > 0, group.head, static_cast<int>(blockIdx.z * blockDim.x + threadIdx.x));
  const int apart = part.is_value ? shape.value_dim : shape.dim;
  const T *in = part.source(at, token);
  if (threadIdx.x == 0 && heads > 0) {
    bring_closer(in - part.left_at, static_cast<uint32_t>(heads * apart * sizeof(T)));
    if (threadIdx.y == 0 && threadIdx.z == 0) {
      bring_angles(indices.positions + token, indices.table, shape.table_rows, shape.half, table_share);
    }
  }
  wait_for_kernels_ahead();
  Found<V> found;
  if (part.has_left) found.load_indices(part, indices, token);
  Bits<T, V> left_bits[N], right_bits[N];
#pragma unroll
  for (int h = 0; h < N; ++h) {
    if (h < heads && part.has_left) left_bits[h].load(in + h * apart);
    if (h < heads && part.has_right) right_bits[h].load(in + h * apart + part.right_at);
  }
  __syncwarp();  // or the compiler may wait for the position, or the slot, before it loads the heads
  const bool has_norm = normed && part.has_left && !part.is_value;
  Factors<V> factors;
  if constexpr (normed) {
    if (has_norm) factors.load(norms, part);
  }
  if (part.has_left) found.load_turn(shape, part, indices);
  Part<V, interleaved> own = part;
#pragma unroll
  for (int h = 0; h < N; ++h) {
    float left[V], right[V];
    left_bits[h].floats(left);
    right_bits[h].floats(right);
    if constexpr (normed) {
      const float rstd = norms.rstd(squares_of_lanes<V>(left, right));
      if (has_norm) factors.apply(rstd, left, right);
    }
    if (h < heads && part.has_left) finish(shape, at, own, token, found, left, right);
    own.first += apart;
  }
}

// A block a head and token, with norms.
template <class T, class C, bool interleaved>
__global__ void __launch_bounds__(kThreads)
    rope_kv_write_wide(Shape shape, Tensors<T, C> at, Indices indices, Norms norms) {
  __shared__ float scratch[32];
  wait_for_kernels_ahead();
  const int64_t token = blockIdx.x;
  const int head = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x);
  const Part<1, interleaved> own(shape, true, head, lane);
  float rstd = 1.0f;
  if (!own.is_value) {  // alike for the whole block
    const T *in = own.source(at, token) - own.left_at;
    float squares = 0.0f;
    for (int i = lane; i < shape.dim; i += kThreads) squares = fmaf(to_float(in[i]), to_float(in[i]), squares);
    rstd = norms.rstd(block_sum(squares, scratch));
  }
  const int lanes = own.is_value ? (shape.value_packs + 1) / 2 : shape.threads;
  for (int i = lane; i < lanes; i += kThreads) {
    const Part<1, interleaved> part(shape, true, head, i);
    const T *in = part.source(at, token);
    float left[1] = {to_float(in[0])}, right[1] = {part.has_right ? to_float(in[part.right_at]) : 0.0f};
    Factors<1> factors;
    Found<1> found;
    found.load_indices(part, indices, token);
    found.load_turn(shape, part, indices);
    if (!part.is_value) {
      factors.load(norms, part);
      factors.apply(rstd, left, right);
    }
    finish(shape, at, part, token, found, left, right);
  }
}

// Threads that a head of q, k or v needs at most, of V elements a pack.
int64_t set_packs(Shape &shape, int V) {
  shape.turning = shape.half / V;
  shape.threads = shape.turning + (shape.dim - 2 * shape.half) / V;
  shape.value_packs = shape.value_dim / V;
  return std::max(shape.threads, (shape.value_packs + 1) / 2);
}

template <class Body>
void with_pairing(const sg_call *call, Body &&body) {
  if (attr_int(call, "interleaved", 0) != 0) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

template <class T, class C>
void launch_wide(const sg_call *call, Shape shape, const Tensors<T, C> &at, const Indices &indices,
                 const Norms &norms) {
  set_packs(shape, 1);
  const dim3 blocks(static_cast<unsigned>(shape.tokens), static_cast<unsigned>(shape.query_heads + 2 * shape.heads));
  with_pairing(call, [&]<bool interleaved>(std::bool_constant<interleaved>) {
    launch_ahead(call, blocks, kThreads, 0, rope_kv_write_wide<T, C, interleaved>, shape, at, indices, norms);
  });
}

// What a block of `most` threads has of lanes of a head, of heads (or groups of them) and of tokens.
struct Plan {
  dim3 block, blocks;

  Plan(int64_t most, int64_t threads, int64_t heads, int64_t all_tokens) {
    const int64_t lanes = std::min(threads, most), along = std::min(heads, most / lanes);
    const int64_t tokens = std::min<int64_t>(most / (lanes * along), kMostTokens);
    block = dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(along), static_cast<unsigned>(tokens));
    blocks = dim3(static_cast<unsigned>(ceil_div(all_tokens, tokens)), static_cast<unsigned>(ceil_div(heads, along)),
                  static_cast<unsigned>(ceil_div(threads, lanes)));
  }
};

template <bool normed, int V, class T, class C>
void launch_many(const sg_call *call, const Shape &shape, int64_t threads, const Tensors<T, C> &at,
                 const Indices &indices, const Norms &norms) {
  using Heads = Group<kManyHeads>;
  const Plan plan(kManyThreads, threads, Heads::count(shape.query_heads) + 2 * Heads::count(shape.heads), shape.tokens);
  const bool needs_all = shape.half > 0 && shape.table_rows <= shape.tokens;
  const int share = needs_all ? static_cast<int>(ceil_div(shape.table_rows, plan.blocks.x)) : 0;
  with_pairing(call, [&]<bool interleaved>(std::bool_constant<interleaved>) {
    launch_ahead(call, plan.blocks, plan.block, 0, rope_kv_write_many<T, C, V, interleaved, normed, kManyHeads>, shape, at,
                 indices, norms, share);
  });
}

template <bool normed, int V, class T, class C>
void launch(const sg_call *call, Shape shape, const Tensors<T, C> &at, const Indices &indices, const Norms &norms) {
  int64_t threads = set_packs(shape, V);
  const int64_t heads = shape.query_heads + 2 * shape.heads;
  if (shape.tokens * heads * threads == 0) return;
  if constexpr (normed) {
    if (threads > 32) return launch_wide(call, shape, at, indices, norms);
    threads = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(threads)));
  }
  if constexpr (V > 1) {
    if (shape.tokens >= kManyTokens) return launch_many<normed, V>(call, shape, threads, at, indices, norms);
  }
  const Plan plan(kThreads, threads, heads, shape.tokens);
  with_pairing(call, [&]<bool interleaved>(std::bool_constant<interleaved>) {
    launch_ahead(call, plan.blocks, plan.block, 0, rope_kv_write_kernel<T, C, V, interleaved, normed>, shape, at, indices,
                 norms);
  });
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
  const sg_tensor *q_weight = input(call, 6), *k_weight = input(call, 7);
  if ((q_weight == nullptr) != (k_weight == nullptr)) return 0;
  if (q_weight != nullptr && (!is_weight_vector(q_weight, q) || !is_weight_vector(k_weight, k))) return 0;
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
  const sg_tensor *q_weight = input(call, 6), *k_weight = input(call, 7);
  const bool fixed = is_fixed(input(call, 3)) && is_fixed(input(call, 5)) && is_fixed(table) &&
                     (q_weight == nullptr || (is_fixed(q_weight) && is_fixed(k_weight)));
  const Indices indices{data<const int32_t>(input(call, 3)), data<const int32_t>(input(call, 5)), data<const float>(table),
                        fixed};
  constexpr int V = 16 / static_cast<int>(sizeof(T));
  const bool packs = shape.half % V == 0 && shape.dim % V == 0 && shape.value_dim % V == 0 && can_pack_rows<V>(at.q) &&
                     can_pack_rows<V>(at.k) && can_pack_rows<V>(at.v) && can_pack_rows<V>(at.rotated) &&
                     can_pack_rows<V>(at.keys) && can_pack_rows<V>(at.values) && can_pack<4>(indices.table, 0);
  if (q_weight == nullptr) {
    packs ? launch<false, V>(call, shape, at, indices, {}) : launch<false, 1>(call, shape, at, indices, {});
    return;
  }
  const Norms norms{weight_of(call, 6), weight_of(call, 7), static_cast<float>(attr_float(call, "eps", 1e-5)),
                    1.0f / static_cast<float>(shape.dim)};
  if (packs && norms.q.packable<V>() && norms.k.packable<V>()) {
    launch<true, V>(call, shape, at, indices, norms);
  } else {
    launch<true, 1>(call, shape, at, indices, norms);
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

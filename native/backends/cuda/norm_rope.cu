// norm_rope(x[T, H, D], weight[D], positions[T], table[P, R/2, 2]) -> y, rstd[T, H]?: the norm of every head, turned.
// norm_rope_grad(dy, x, weight, rstd, positions, table, addend?) -> dx: dy turned back, and the norm's gradient of that.
// f32 or bf16; rows of all but rstd may lie apart, y may be x and dx may be dy. A position outside the table gives NaN.
//
// The floor is bytes: x in and y out, or dy and x in and dx out, each once; weight and angles are a few hundred bytes
// that all heads of a token read from the caches. A head is shared by a power of two of lanes of one warp, each with V
// pairs of it or two packs of what lies behind them, so it stays in registers between its sum and its use. A thread has
// that of two heads of a token, 64 or 128 bytes that are under way together, and weight and angles for both. Blocks
// have an axis for each of lane, heads and token, so no thread divides. Heads that cannot be moved in packs, or are too
// wide for a warp's registers, are read twice by a warp each.
#include <algorithm>
#include <bit>

#include "bits.cuh"
#include "norm_weight.cuh"
#include "prefetch.cuh"
#include "rope.cuh"
#include "rows.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kHeads = 2;           // of one token, in one thread
constexpr int kMostBlocks = 65535;  // along the grid's second axis
constexpr int kMostTokens = 64;     // of a block: its third axis holds no more

struct Shape {
  int tokens, heads, dim, half;
  int turning;      // lanes that a head needs for its pairs
  int lanes;        // the same, with those for dims past R; some more may be there and idle
  float inverse_dim;
};

struct Angles {
  const int32_t *positions;
  const float *table;
  int64_t rows;
  int share;  // rows of the table that a block asks for: 0 where tokens may need few of them
  float sign;
};

// The heads of one token that a thread works on; zero or fewer for a thread that has none.
struct Task {
  int token, head, heads;

  __device__ explicit Task(const Shape &shape) {
    token = static_cast<int>(blockIdx.x * blockDim.z + threadIdx.z);
    head = static_cast<int>(blockIdx.y * blockDim.y + threadIdx.y) * kHeads;
    heads = token < shape.tokens ? min(shape.heads - head, kHeads) : 0;
  }
  template <class T>
  __device__ T *at(const Rows<T> &rows, const Shape &shape, int column) const {
    return rows.data + token * rows.stride + (head * shape.dim + column);
  }
  // Of the first head, in what has a number a head.
  __device__ int64_t at_head(const Shape &shape) const { return static_cast<int64_t>(token) * shape.heads + head; }
  // One thread of a token asks for the heads that the block has of it, where they begin at a multiple of 16 bytes.
  template <class T>
  __device__ void bring(const Rows<const T> &rows, const Shape &shape) const {
    if (threadIdx.x != 0 || threadIdx.y != 0 || heads <= 0) return;
    const int count = min(shape.heads - head, static_cast<int>(blockDim.y) * kHeads);
    bring_closer(at(rows, shape, 0), static_cast<uint32_t>(count * shape.dim * sizeof(T)));
  }
};

// A lane's part of a head: two packs of V whose pairs it turns, or one or two of those behind.
template <int V, bool interleaved>
struct Part {
  bool turns;
  int pair, left, right;  // right: from left on
  int packs;              // how many of the two are there

  __device__ Part(const Shape &shape, int lane) {
    turns = lane < shape.turning;
    pair = lane * V;
    left = turns ? (interleaved ? 2 * pair : pair) : 2 * shape.half + (lane - shape.turning) * 2 * V;
    right = turns && !interleaved ? shape.half : V;
    packs = lane >= shape.lanes ? 0 : turns || left + V < shape.dim ? 2 : 1;
  }
  __device__ void load_angles(const Angles &angles, int half, int32_t position, float (&cos)[V],
                              float (&sin)[V]) const {
    if (turns) cuda::load_angles<V>(angles.table, angles.rows, half, position, pair, angles.sign, cos, sin);
  }
};

// What a lane holds of a head; zeros where there is none.
template <class T, int V>
struct Held {
  Bits<T, V> left, right;

  template <bool interleaved>
  __device__ void load(const T *head, const Part<V, interleaved> &part, bool exists) {
    if (exists && part.packs > 0) left.load(head);
    if (exists && part.packs > 1) right.load(head + part.right);
  }
  __device__ void floats(float (&a)[V], float (&b)[V]) const {
    left.floats(a);
    right.floats(b);
  }
};

// A lane's part of the sum over a head of what it holds times (a, b).
template <class T, int V>
__device__ inline float dot_of_lane(const Held<T, V> &held, const float (&a)[V], const float (&b)[V]) {
  float left[V], right[V], sum = 0.0f, more = 0.0f;
  held.floats(left, right);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    sum = fmaf(a[i], left[i], sum);
    more = fmaf(b[i], right[i], more);
  }
  return sum + more;
}

// That sum, for all lanes of the head; all of their warp call it.
template <class T, int V>
__device__ inline float dot_of_head(const Held<T, V> &held, const float (&a)[V], const float (&b)[V]) {
  float sum = dot_of_lane(held, a, b);
  for (int offset = static_cast<int>(blockDim.x) / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  return sum;
}

template <int V>
__device__ inline void scale_both(float scale, const float (&by_a)[V], const float (&by_b)[V], float (&a)[V],
                                  float (&b)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    a[i] *= scale * by_a[i];
    b[i] *= scale * by_b[i];
  }
}

template <int V, bool interleaved, class T>
__device__ inline void store_both(T *to, const Part<V, interleaved> &part, const float (&a)[V], const float (&b)[V]) {
  if (part.packs > 0) store<V>(to, a);
  if (part.packs > 1) store<V>(to + part.right, b);
}

__device__ inline void bring_share(const Angles &angles, const Shape &shape, int token) {
  if (threadIdx.x != 0 || threadIdx.y != 0 || threadIdx.z != 0 || token >= shape.tokens) return;
  bring_angles(angles.positions + token, angles.table, angles.rows, shape.half, angles.share);
}

// ---- norm_rope

template <class T, int V, bool interleaved>
__global__ void __launch_bounds__(kThreads, 6)
    norm_rope_packs(Shape shape, Rows<const T> x, Weight weight, float eps, Angles angles, Rows<T> y, float *rstd_out) {
  const Task task(shape);
  const Part<V, interleaved> part(shape, static_cast<int>(threadIdx.x));
  task.bring(x, shape);
  bring_share(angles, shape, task.token);
  wait_for_kernels_ahead();
  const T *in = task.at(x, shape, part.left);
  Held<T, V> held[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) held[h].load(in + h * shape.dim, part, h < task.heads);
  __syncwarp();  // or the compiler may have position and weight loaded first, and waited for
  float by_left[V]{}, by_right[V]{}, cos[V], sin[V];
  if (task.heads > 0) {
    int32_t position = angles.positions[task.token];
    weight.load_packs<V>(part.left, part.right, part.packs, by_left, by_right);
    use_from_here(position);
    part.load_angles(angles, shape.half, position, cos, sin);
  }
  T *out = task.at(y, shape, part.left);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float left[V], right[V];
    held[h].floats(left, right);
    const float rstd = rsqrtf(fmaf(dot_of_head(held[h], left, right), shape.inverse_dim, eps));
    if (h < task.heads) {
      scale_both<V>(rstd, by_left, by_right, left, right);
      if (part.turns) turn<V, interleaved>(cos, sin, left, right);
      store_both(out + h * shape.dim, part, left, right);
      if (rstd_out != nullptr && threadIdx.x == 0) rstd_out[task.at_head(shape) + h] = rstd;
    }
  }
}

// A warp a head.
template <class T, bool interleaved>
__global__ void __launch_bounds__(kWarpTaskThreads)
    norm_rope_any(Shape shape, Rows<const T> x, Weight weight, float eps, Angles angles, Rows<T> y, float *rstd_out) {
  wait_for_kernels_ahead();
  const int64_t head = warp_task(), token = head / shape.heads;
  if (token >= shape.tokens) return;
  const int64_t column = (head - token * shape.heads) * shape.dim;
  const T *in = x.data + token * x.stride + column;
  T *out = y.data + token * y.stride + column;
  float squares = 0.0f;
  for (int i = lane_index(); i < shape.dim; i += 32) squares = fmaf(to_float(in[i]), to_float(in[i]), squares);
  const float rstd = rsqrtf(fmaf(warp_sum(squares), shape.inverse_dim, eps));
  for (int lane = lane_index(); lane < shape.lanes; lane += 32) {
    const Part<1, interleaved> part(shape, lane);
    float left[1], right[1], by_left[1]{}, by_right[1]{}, cos[1], sin[1];
    Held<T, 1> held;
    held.load(in + part.left, part, true);
    held.floats(left, right);
    weight.load_packs<1>(part.left, part.right, part.packs, by_left, by_right);
    part.load_angles(angles, shape.half, angles.positions[token], cos, sin);
    scale_both<1>(rstd, by_left, by_right, left, right);
    if (part.turns) turn<1, interleaved>(cos, sin, left, right);
    store_both(out + part.left, part, left, right);
  }
  if (rstd_out != nullptr && lane_index() == 0) rstd_out[head] = rstd;
}

// ---- norm_rope_grad: dx = rstd * g - c * x + addend with g = turned dy * weight and c = rstd^3 * mean(g * x).

// What dy is once it is turned back and weighed.
template <int V, bool interleaved, class T>
__device__ inline void turn_back(const Held<T, V> &held, const Part<V, interleaved> &part, const float (&cos)[V],
                                 const float (&sin)[V], const float (&by_a)[V], const float (&by_b)[V], float (&a)[V],
                                 float (&b)[V]) {
  held.floats(a, b);
  if (part.turns) turn<V, interleaved>(cos, sin, a, b);
  scale_both<V>(1.0f, by_a, by_b, a, b);
}

// g becomes dx, of what both packs hold.
template <class T, int V, bool interleaved>
__device__ inline void finish(float rstd, float c, const Held<T, V> &x, const T *addend,
                              const Part<V, interleaved> &part, float (&a)[V], float (&b)[V]) {
  float left[V], right[V];
  x.floats(left, right);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    a[i] = fmaf(-c, left[i], rstd * a[i]);
    b[i] = fmaf(-c, right[i], rstd * b[i]);
  }
  if (addend == nullptr) return;
  Held<T, V> added;
  added.load(addend, part, true);
  added.floats(left, right);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    a[i] += left[i];
    b[i] += right[i];
  }
}

template <class T, int V, bool interleaved>
__global__ void __launch_bounds__(kThreads, 4)
    norm_rope_grad_packs(Shape shape, Rows<const T> dy, Rows<const T> x, Weight weight, const float *rstd,
                         Angles angles, Rows<const T> addend, Rows<T> dx) {
  const Task task(shape);
  const Part<V, interleaved> part(shape, static_cast<int>(threadIdx.x));
  task.bring(dy, shape);
  task.bring(x, shape);
  bring_share(angles, shape, task.token);
  wait_for_kernels_ahead();
  const T *gradient = task.at(dy, shape, part.left), *in = task.at(x, shape, part.left);
  Held<T, V> held_dy[kHeads], held_x[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    held_dy[h].load(gradient + h * shape.dim, part, h < task.heads);
    held_x[h].load(in + h * shape.dim, part, h < task.heads);
  }
  __syncwarp();  // as above
  float by_left[V]{}, by_right[V]{}, cos[V], sin[V], scales[kHeads]{};
  if (task.heads > 0) {
    int32_t position = angles.positions[task.token];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h < task.heads) scales[h] = rstd[task.at_head(shape) + h];
    }
    weight.load_packs<V>(part.left, part.right, part.packs, by_left, by_right);
    use_from_here(position);
    part.load_angles(angles, shape.half, position, cos, sin);
  }
  const T *added = addend.data == nullptr ? nullptr : task.at(addend, shape, part.left);
  T *out = task.at(dx, shape, part.left);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float a[V], b[V];
    turn_back(held_dy[h], part, cos, sin, by_left, by_right, a, b);
    const float c = scales[h] * scales[h] * scales[h] * (dot_of_head(held_x[h], a, b) * shape.inverse_dim);
    if (h < task.heads) {
      finish(scales[h], c, held_x[h], added == nullptr ? nullptr : added + h * shape.dim, part, a, b);
      store_both(out + h * shape.dim, part, a, b);
    }
  }
}

template <class T, bool interleaved>
__global__ void __launch_bounds__(kWarpTaskThreads)
    norm_rope_grad_any(Shape shape, Rows<const T> dy, Rows<const T> x, Weight weight, const float *rstd, Angles angles,
                       Rows<const T> addend, Rows<T> dx) {
  wait_for_kernels_ahead();
  const int64_t head = warp_task(), token = head / shape.heads;
  if (token >= shape.tokens) return;
  const int64_t column = (head - token * shape.heads) * shape.dim;
  const T *in = x.data + token * x.stride + column;
  float a[1], b[1];
  const auto load_part = [&](const Part<1, interleaved> &part) {
    float by_left[1]{}, by_right[1]{}, cos[1], sin[1];
    Held<T, 1> held;
    held.load(dy.data + token * dy.stride + column + part.left, part, true);
    weight.load_packs<1>(part.left, part.right, part.packs, by_left, by_right);
    part.load_angles(angles, shape.half, angles.positions[token], cos, sin);
    turn_back(held, part, cos, sin, by_left, by_right, a, b);
    Held<T, 1> held_x;
    held_x.load(in + part.left, part, true);
    return held_x;
  };
  float dot = 0.0f;
  for (int lane = lane_index(); lane < shape.lanes; lane += 32) {
    dot += dot_of_lane(load_part(Part<1, interleaved>(shape, lane)), a, b);
  }
  const float scale = rstd[head], c = scale * scale * scale * (warp_sum(dot) * shape.inverse_dim);
  for (int lane = lane_index(); lane < shape.lanes; lane += 32) {
    const Part<1, interleaved> part(shape, lane);
    const Held<T, 1> held = load_part(part);
    const int64_t first = column + part.left;
    finish(scale, c, held, addend.data == nullptr ? nullptr : addend.data + token * addend.stride + first, part, a, b);
    store_both(dx.data + token * dx.stride + first, part, a, b);
  }
}

// ---- Launching

bool is_heads(const sg_tensor *t) {
  return t != nullptr && t->rank == 3 && is_activation(t) && has_packable_rows(t);
}
bool is_like(const sg_tensor *t, const sg_tensor *x) { return is_heads(t) && t->dtype == x->dtype && same_shape(t, x); }
bool is_rstd(const sg_tensor *t, const sg_tensor *x) {
  return t->dtype == SG_F32 && t->rank == 2 && is_dense(t) && t->shape[0] == x->shape[0] && t->shape[1] == x->shape[1];
}
bool can_turn(const sg_tensor *x, const sg_tensor *weight, const sg_tensor *positions, const sg_tensor *table) {
  if (!is_heads(x) || !weight || !positions || !table || !is_weight_vector(weight, x)) return false;
  if (x->shape[2] < 1 || x->shape[1] > kMostBlocks || x->shape[1] * x->shape[2] > INT32_MAX / 4) return false;
  if (x->shape[0] > INT32_MAX - kMostTokens) return false;
  if (positions->dtype != SG_I32 || positions->rank != 1 || positions->shape[0] != x->shape[0]) return false;
  if (!is_dense(positions) || !is_dense(table) || table->dtype != SG_F32 || table->rank != 3) return false;
  return table->shape[2] == 2 && 2 * table->shape[1] <= x->shape[2];
}

Shape shape_of(const sg_tensor *x, const sg_tensor *table) {
  const auto size = [](int64_t n) { return static_cast<int>(n); };
  return {size(x->shape[0]), size(x->shape[1]), size(x->shape[2]), size(table->shape[1]), 0, 0,
          1.0f / static_cast<float>(x->shape[2])};
}
void set_lanes(Shape &shape, int V) {
  shape.turning = shape.half / V;
  shape.lanes = shape.turning + static_cast<int>(ceil_div((shape.dim - 2 * shape.half) / V, 2));
}

struct Launch {
  dim3 block, blocks;
};
Launch plan_packs(const Shape &shape) {
  const auto lanes = static_cast<int64_t>(std::bit_ceil(static_cast<unsigned>(shape.lanes)));
  const int64_t groups = ceil_div(shape.heads, kHeads), along = std::min(groups, kThreads / lanes);
  const int64_t tokens = std::min<int64_t>(kThreads / (lanes * along), kMostTokens);
  return {dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(along), static_cast<unsigned>(tokens)),
          dim3(static_cast<unsigned>(ceil_div(shape.tokens, tokens)), static_cast<unsigned>(ceil_div(groups, along)))};
}

template <class Body>
void with_pairing(const sg_call *call, Body &&body) {
  if (attr_int(call, "interleaved", 0) != 0) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

// packs(angles, plan) where heads can be moved in packs of V by the lanes of a warp, else any(angles, blocks).
template <int V, class Packs, class Any>
void launch(bool can_pack_operands, Shape &shape, const sg_tensor *positions, const sg_tensor *table, float sign,
            Packs &&packs, Any &&any) {
  const int64_t heads = static_cast<int64_t>(shape.tokens) * shape.heads;
  if (heads == 0) return;
  Angles angles{data<int32_t>(positions), data<float>(table), table->shape[0], 0, sign};
  set_lanes(shape, V);
  const bool fits = shape.half % V == 0 && shape.dim % V == 0 && shape.lanes <= 32 && can_pack<4>(angles.table, 0);
  if (can_pack_operands && fits) {
    const Launch plan = plan_packs(shape);
    const bool needs_all = shape.half > 0 && angles.rows <= shape.tokens;
    angles.share = needs_all ? static_cast<int>(ceil_div(angles.rows, plan.blocks.x)) : 0;
    packs(angles, plan);
  } else {
    set_lanes(shape, 1);
    any(angles, warp_task_blocks(heads));
  }
}

int32_t supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *y = output(call, 0), *rstd = output(call, 1);
  if (!can_turn(x, input(call, 1), input(call, 2), input(call, 3)) || !is_like(y, x)) return 0;
  return rstd == nullptr || is_rstd(rstd, x) ? 10 : 0;
}

template <class T, bool interleaved>
void run_with(const sg_call *call) {
  constexpr int V = 16 / static_cast<int>(sizeof(T));
  const sg_tensor *x = input(call, 0), *table = input(call, 3);
  Shape shape = shape_of(x, table);
  const int64_t width = static_cast<int64_t>(shape.heads) * shape.dim;
  const Rows<const T> in = rows_of<const T>(x, width);
  const Rows<T> out = rows_of<T>(output(call, 0), width);
  const Weight weight = weight_of(call, 1);
  const float eps = static_cast<float>(attr_float(call, "eps", 1e-5));
  float *rstd = data<float>(output(call, 1));
  launch<V>(
      can_pack_rows<V>(in) && can_pack_rows<V>(out) && weight.packable<V>(), shape, input(call, 2), table, 1.0f,
      [&](const Angles &angles, const Launch &plan) {
        launch_ahead(call, plan.blocks, plan.block, 0, norm_rope_packs<T, V, interleaved>, shape, in, weight, eps,
                     angles, out, rstd);
      },
      [&](const Angles &angles, unsigned blocks) {
        launch_ahead(call, blocks, kWarpTaskThreads, 0, norm_rope_any<T, interleaved>, shape, in, weight, eps, angles,
                     out, rstd);
      });
}

int32_t run(const sg_call *call) {
  with_type(input(call, 0), [&]<class T>(T) {
    with_pairing(call, [&]<bool interleaved>(std::bool_constant<interleaved>) { run_with<T, interleaved>(call); });
  });
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("norm_rope", "cuda", 0, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

int32_t grad_supports(const sg_call *call) {
  const sg_tensor *x = input(call, 1), *rstd = input(call, 3), *addend = input(call, 6);
  if (!can_turn(x, input(call, 2), input(call, 4), input(call, 5)) || !is_like(input(call, 0), x)) return 0;
  if (!is_like(output(call, 0), x) || (addend != nullptr && !is_like(addend, x))) return 0;
  return rstd != nullptr && is_rstd(rstd, x) ? 10 : 0;
}

template <class T, bool interleaved>
void run_grad_with(const sg_call *call) {
  constexpr int V = 16 / static_cast<int>(sizeof(T));
  const sg_tensor *x = input(call, 1), *table = input(call, 5), *addend = input(call, 6);
  Shape shape = shape_of(x, table);
  const int64_t width = static_cast<int64_t>(shape.heads) * shape.dim;
  const Rows<const T> gradient = rows_of<const T>(input(call, 0), width), in = rows_of<const T>(x, width);
  const Rows<const T> added = addend == nullptr ? Rows<const T>{nullptr, 0} : rows_of<const T>(addend, width);
  const Rows<T> out = rows_of<T>(output(call, 0), width);
  const Weight weight = weight_of(call, 2);
  const float *rstd = data<float>(input(call, 3));
  const bool packs = can_pack_rows<V>(gradient) && can_pack_rows<V>(in) && can_pack_rows<V>(added) &&
                     can_pack_rows<V>(out) && weight.packable<V>();
  launch<V>(
      packs, shape, input(call, 4), table, -1.0f,
      [&](const Angles &angles, const Launch &plan) {
        launch_ahead(call, plan.blocks, plan.block, 0, norm_rope_grad_packs<T, V, interleaved>, shape, gradient, in,
                     weight, rstd, angles, added, out);
      },
      [&](const Angles &angles, unsigned blocks) {
        launch_ahead(call, blocks, kWarpTaskThreads, 0, norm_rope_grad_any<T, interleaved>, shape, gradient, in, weight,
                     rstd, angles, added, out);
      });
}

int32_t grad_run(const sg_call *call) {
  with_type(input(call, 1), [&]<class T>(T) {
    with_pairing(call, [&]<bool interleaved>(std::bool_constant<interleaved>) { run_grad_with<T, interleaved>(call); });
  });
  return launched(call);
}

constexpr sg_kernel grad_kernel = describe_kernel("norm_rope_grad", "cuda", 0, grad_supports, nullptr, grad_run);
SG_REGISTER_KERNEL(grad_kernel);

}  // namespace
}  // namespace sg::cuda

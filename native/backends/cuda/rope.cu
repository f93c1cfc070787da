// rope(x[T, H, D], positions[T], table[P, R/2, 2]) -> y: each head's first R dims are rotated pair by pair, f32 or
// bf16. Rows of x and y may lie apart, and y may be x. A position outside the table gives NaN.
//
// The floor is bytes: x once in, y once out; the table's row is a few hundred bytes beside a token's kilobytes. A
// thread turns V pairs in two heads of a token: 64 bytes of x, under way before it waits for the position and then for
// the angles, which every head of a token reads from the cache; and on their way there before the kernel ahead has
// ended, since the keys of 4,096 tokens take memory no longer than a load and a store. Blocks have an axis for each of
// lane, heads and token: no thread divides, since a small tensor takes hardly longer than a thread does.
#include <algorithm>

#include "bits.cuh"
#include "prefetch.cuh"
#include "rope.cuh"
#include "rows.cuh"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 2;           // of one token, in one thread
constexpr int kMostBlocks = 65535;  // along the grid's second and third axis
constexpr int kMostTokens = 64;     // of a block: its third axis holds no more

int32_t supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *positions = input(call, 1), *table = input(call, 2), *y = output(call, 0);
  if (!x || !positions || !table || !y || x->rank != 3 || !same_shape(x, y)) return 0;
  if (!is_activation(x) || x->dtype != y->dtype || !has_packable_rows(x) || !has_packable_rows(y)) return 0;
  if (positions->dtype != SG_I32 || positions->rank != 1 || positions->shape[0] != x->shape[0]) return 0;
  if (!is_dense(positions) || !is_dense(table) || table->dtype != SG_F32) return 0;
  if (table->rank != 3 || table->shape[2] != 2 || 2 * table->shape[1] > x->shape[2]) return 0;
  if (x->shape[1] > kMostBlocks || x->shape[2] > kMostBlocks || x->shape[0] > INT32_MAX) return 0;
  return 10;
}

struct Heads {
  int64_t tokens, table_rows;
  int heads, dim, half;
  int turning;  // threads that a head needs for its pairs
  int threads;  // the same, with those that copy dims past R
  int table_share;  // rows of the table that a block asks for: 0 where tokens may need few of them
};

// One thread of a token asks for the token's heads in its block, and one of the block for what all of them wait for
// next: positions, and a share of the table.
template <class T>
__device__ inline void bring_operands(const Heads &shape, const T *heads, int count, const int32_t *position,
                                      const float *table) {
  if (threadIdx.x != 0 || threadIdx.y != 0) return;
  bring_closer(heads, static_cast<uint32_t>(count * shape.dim * sizeof(T)));
  if (threadIdx.z != 0) return;
  bring_angles(position, table, shape.table_rows, shape.half, shape.table_share);
}

template <class T, int V, bool interleaved>
__global__ void __launch_bounds__(kThreads, 4)
    rope_packs(Heads shape, Rows<const T> x, const int32_t *positions, const float *table, float sign, Rows<T> y) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  const int head = static_cast<int>(blockIdx.y * blockDim.y + threadIdx.y) * kHeads;
  const int lane = static_cast<int>(blockIdx.z * blockDim.x + threadIdx.x);
  const bool exists = token < shape.tokens && lane < shape.threads, turns = lane < shape.turning;
  const int heads = exists ? min(shape.heads - head, kHeads) : 0;  // zero or below: none
  // A thread that turns has two packs of a head; one that copies what lies behind the pairs has the first alone.
  const int pair = lane * V, left = turns ? (interleaved ? 2 * pair : pair) : 2 * shape.half + pair - shape.turning * V;
  const int right = interleaved ? V : shape.half;
  const int64_t first = static_cast<int64_t>(head) * shape.dim + left;
  const T *in = x.data + token * x.stride + first;
  if (V > 1 && heads > 0) {
    const int all = min(shape.heads - head, static_cast<int>(blockDim.y) * kHeads);
    bring_operands(shape, in - left, all, positions + token, table);
  }
  wait_for_kernels_ahead();
  Bits<T, V> left_bits[kHeads], right_bits[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h < heads) left_bits[h].load(in + h * shape.dim);
    if (h < heads && turns) right_bits[h].load(in + h * shape.dim + right);
  }
  __syncwarp();  // or the compiler has the position loaded first, and waited for, before x
  if (heads <= 0) return;
  float cos[V], sin[V];
  if (turns) load_angles<V>(table, shape.table_rows, shape.half, positions[token], pair, sign, cos, sin);
  T *out = y.data + token * y.stride + first;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= heads) break;
    float a[V], b[V];
    left_bits[h].floats(a);
    right_bits[h].floats(b);
    if (turns) turn<V, interleaved>(cos, sin, a, b);
    store<V>(out + h * shape.dim, a);
    if (turns) store<V>(out + h * shape.dim + right, b);
  }
}

template <class T, int V>
int32_t run_packs(const sg_call *call, Heads shape, const Rows<const T> &x, const Rows<T> &y) {
  const bool copies = static_cast<const void *>(x.data) != static_cast<const void *>(y.data);
  shape.turning = shape.half / V;
  shape.threads = shape.turning + (copies ? (shape.dim - 2 * shape.half) / V : 0);
  const int64_t groups = ceil_div(shape.heads, kHeads);
  if (shape.tokens * groups * shape.threads == 0) return SG_OK;
  const int64_t lanes = std::min<int64_t>(shape.threads, kThreads), along = std::min(groups, kThreads / lanes);
  const int64_t tokens = std::min<int64_t>(kThreads / (lanes * along), kMostTokens);
  const dim3 block(static_cast<unsigned>(lanes), static_cast<unsigned>(along), static_cast<unsigned>(tokens));
  const dim3 blocks(static_cast<unsigned>(ceil_div(shape.tokens, tokens)),
                    static_cast<unsigned>(ceil_div(groups, along)),
                    static_cast<unsigned>(ceil_div(shape.threads, lanes)));
  const bool needs_all = shape.half > 0 && shape.table_rows <= shape.tokens;
  shape.table_share = needs_all ? static_cast<int>(ceil_div(shape.table_rows, blocks.x)) : 0;
  const int32_t *positions = data<int32_t>(input(call, 1));
  const float *table = data<float>(input(call, 2));
  const float sign = attr_int(call, "inverse", 0) != 0 ? -1.0f : 1.0f;
  const auto go = [&](auto kernel) {
    launch_ahead(call, blocks, block, 0, kernel, shape, x, positions, table, sign, y);
  };
  if (attr_int(call, "interleaved", 0) != 0) {
    go(rope_packs<T, V, true>);
  } else {
    go(rope_packs<T, V, false>);
  }
  return launched(call);
}

int32_t run(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *table = input(call, 2), *y = output(call, 0);
  const int64_t heads = x->shape[1], dim = x->shape[2], half = table->shape[1];
  const Heads shape{x->shape[0], table->shape[0], static_cast<int>(heads), static_cast<int>(dim),
                    static_cast<int>(half), 0, 0, 0};
  int32_t status = SG_OK;
  with_type(x, [&]<class T>(T) {
    constexpr int V = 16 / static_cast<int>(sizeof(T));
    const Rows<const T> in = rows_of<const T>(x, heads * dim);
    const Rows<T> out = rows_of<T>(y, heads * dim);
    const bool packs = half % V == 0 && dim % V == 0 && can_pack_rows<V>(in) && can_pack_rows<V>(out) &&
                       can_pack<4>(data<float>(table), 0);
    status = packs ? run_packs<T, V>(call, shape, in, out) : run_packs<T, 1>(call, shape, in, out);
  });
  return status;
}

constexpr sg_kernel kernel = describe_kernel("rope", "cuda", 0, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda

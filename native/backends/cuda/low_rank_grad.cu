// low_rank_grad: what the second half of a low-rank branch hands back, with R a few dozen at most,
//
//   dlow[T, R] = alpha dy[T, N] b[N, R]        db[N, R] += alpha dy^T low[T, R]
//
// 4 T N R FLOPs; floor: the bytes of dy, once. `one_pass` reads dy once, in bf16, for R of 8 to 64. A block walks down
// a strip of rows of a chunk of columns, 16 rows at a time, which come to shared memory several steps ahead. Each warp
// has some of the chunk's columns: their rows of b lie in its registers from the start, their rows of db's sums until
// the end, and what they give to 16 rows of dlow is added up over the warps in shared memory. So a block leaves one
// part of dlow for each chunk and one of db for each strip, in fp32; at R 16 and T 4096 these are a tenth (N 14336) to
// a quarter (N 4096) of dy's bytes, and fit in the second-level cache. A second kernel adds the parts in order.
//
// Parts lie as mma's results do: 16 x 8 tiles of 128 floats, four of each lane (see attention_ptx.cuh).
//
// Everything else is two products of the library (`cublaslt`).
#include <memory>
#include <new>
#include <string>

#include "attention_ptx.cuh"
#include "gemm.h"
#include "gemm_kernels.h"
#include "vectors.cuh"

namespace sg::cuda {
namespace {

int64_t row_stride(const sg_tensor *t) { return t->shape[0] <= 1 ? t->shape[1] : t->strides[0]; }

bool is_matrix(const sg_tensor *t, int64_t rows, int64_t columns, int32_t dtype) {
  return t != nullptr && t->rank == 2 && t->dtype == dtype && t->shape[0] == rows && t->shape[1] == columns &&
         has_dense_rows(t);
}

struct Call {
  const sg_tensor *dy, *b, *low, *dlow, *db;
  int64_t tokens, features, rank;
};

// False where no kernel here can run it: dy, b, low and dlow are all bf16 or all f32.
bool read_call(const sg_call *call, Call *c) {
  if (call->num_inputs != 3 || call->num_outputs != 2) return false;
  *c = {input(call, 0), input(call, 1), input(call, 2), output(call, 0), output(call, 1), 0, 0, 0};
  if (c->dy == nullptr || c->b == nullptr || c->dy->rank != 2 || c->b->rank != 2 || !is_activation(c->dy)) return false;
  c->tokens = c->dy->shape[0], c->features = c->dy->shape[1], c->rank = c->b->shape[1];
  const int32_t dtype = c->dy->dtype;
  return is_matrix(c->dy, c->tokens, c->features, dtype) && is_matrix(c->b, c->features, c->rank, dtype) &&
         is_matrix(c->low, c->tokens, c->rank, dtype) && is_matrix(c->dlow, c->tokens, c->rank, dtype) &&
         is_matrix(c->db, c->features, c->rank, SG_F32);
}

float alpha_of(const sg_call *call) { return static_cast<float>(attr_float(call, "alpha", 1.0)); }

// ---- two products

GemmProblem low_problem(const Call &c) {
  GemmProblem p;
  p.m = c.tokens, p.n = c.rank, p.k = c.features;
  p.ab_dtype = p.d_dtype = c.dy->dtype;
  p.lda = row_stride(c.dy), p.ldb = row_stride(c.b), p.ldc = p.ldd = row_stride(c.dlow);
  return p;
}

GemmProblem weight_problem(const Call &c) {
  GemmProblem p;
  p.m = c.features, p.n = c.rank, p.k = c.tokens;
  p.transpose_a = p.add_c = true;
  p.ab_dtype = c.dy->dtype, p.d_dtype = SG_F32;
  p.lda = row_stride(c.dy), p.ldb = row_stride(c.low), p.ldc = p.ldd = row_stride(c.db);
  return p;
}

struct Products {
  std::unique_ptr<Gemm> low, weight;
};

int32_t products_supports(const sg_call *call) {
  Call c;
  return read_call(call, &c) ? 10 : 0;
}

size_t products_workspace(const sg_call *call) {
  Call c;
  if (!read_call(call, &c)) return 0;
  const size_t low = gemm_workspace_bytes(low_problem(c)), weight = gemm_workspace_bytes(weight_problem(c));
  return low < weight ? weight : low;
}

int32_t products_prepare(const sg_call *call, void **state) {
  Call c;
  if (!read_call(call, &c)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  std::string error;
  Products products{Gemm::plan(low_problem(c), nullptr, &error), nullptr};
  if (products.low != nullptr) products.weight = Gemm::plan(weight_problem(c), nullptr, &error);
  if (products.weight == nullptr) return fail(call, "%s", error.c_str());
  *state = new (std::nothrow) Products(std::move(products));
  return *state == nullptr ? fail(call, "%s: out of memory", call->op) : SG_OK;
}

void products_release(void *state) { delete static_cast<Products *>(state); }

int32_t products_run(const sg_call *call) {
  Call c;
  if (!read_call(call, &c)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  const auto *products = static_cast<const Products *>(call->state);
  const float alpha = alpha_of(call);
  const int32_t result = products->low->run(call, alpha, c.dy->data, c.b->data, nullptr, c.dlow->data, nullptr,
                                            call->workspace);
  if (result != SG_OK) return result;
  return products->weight->run(call, alpha, c.dy->data, c.low->data, c.db->data, c.db->data, nullptr,
                               call->workspace);
}

// ---- one pass

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRows = 16;               // of a step: the depth of one mma
constexpr int kBlocks = 160;            // about; all of them run at once on a large device
constexpr int kLeastRows = 64;          // of a strip
constexpr int kSharedBytes = 96 << 10;  // what a block may have on every device; two fit on Hopper
constexpr int kMostTiles = 8;

// Of columns of a chunk, where R is 8 * tiles: as many as registers allow.
constexpr int warp_columns(int tiles) { return tiles <= 4 ? 64 : 32; }
constexpr int chunk_columns(int tiles) { return kWarps * warp_columns(tiles); }

template <int tiles>
struct Layout {
  static constexpr int kColumnTiles = warp_columns(tiles) / 16;  // of a warp
  static constexpr int kColumns = chunk_columns(tiles);
  static constexpr int kPacks = kColumns / 8;                    // of 16 bytes, in a row of dy's step
  static constexpr int kLowPacks = tiles | 1;                    // an odd number spreads 8 rows over all banks
  static constexpr int kDyBytes = kRows * kPacks * 16;
  static constexpr int kStepBytes = kDyBytes + kRows * kLowPacks * 16;
  static constexpr int kSums = 128 * tiles;                      // of dlow, a step
  static constexpr int kSumBuffers = tiles <= 2 ? 2 : 1;         // two save a barrier a step
  static constexpr int kSumBytes = kSumBuffers * kWarps * kSums * 4;
  static constexpr int kFit = (kSharedBytes - kSumBytes) / kStepBytes;
  static constexpr int kSteps = kFit < 6 ? kFit : 6;             // in shared memory at a time
  static constexpr int kBytes = kSteps * kStepBytes + kSumBytes;
  static_assert(kSteps >= 3);
};

struct Operands {
  const bf16 *dy, *b, *low;
  float *low_parts, *weight_parts;  // [chunks][row tiles][tiles][128], [strips][column tiles][tiles][128]
  int64_t dy_stride, b_stride, low_stride;
  int tokens, features, strip;      // strip: rows of one block, a multiple of kRows
};

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits for all but the last `pending` groups of copies of this thread.
template <int pending>
__device__ inline void wait_copies_but() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending) : "memory");
}

// Where a step keeps 8 neighbouring elements of a row of dy: rows that are read together are in different banks.
template <int tiles>
__device__ inline uint32_t dy_place(int row, int pack) {
  return static_cast<uint32_t>((row * Layout<tiles>::kPacks + (pack ^ (row & 7))) * 16);
}
template <int tiles>
__device__ inline uint32_t low_place(int row, int pack) {
  return static_cast<uint32_t>(Layout<tiles>::kDyBytes + (row * Layout<tiles>::kLowPacks + pack) * 16);
}

// What a thread brings to shared memory: of each step some packs of dy, below one another, and one of low, or none.
// Addresses go on from step to step; zeros stand for what is not there.
template <int tiles>
struct Copies {
  using L = Layout<tiles>;
  static constexpr int kRowsAtOnce = kThreads / L::kPacks, kCount = kRows / kRowsAtOnce;
  const bf16 *dy, *low;
  int dy_left, low_left;  // rows that there still are, from the one that is next
  uint32_t dy_to[kCount], low_to;

  __device__ Copies(const Operands &p, int begin, int end) {
    const int thread = threadIdx.x, row = thread / L::kPacks, pack = thread % L::kPacks, low_row = thread / tiles;
    const int column = blockIdx.x * L::kColumns + 8 * pack;
    dy = p.dy + (begin + row) * p.dy_stride + column;
    dy_left = column < p.features ? end - begin - row : 0;
    low = p.low + (begin + low_row) * p.low_stride + 8 * (thread % tiles);
    low_left = end - begin - low_row;
    low_to = low_place<tiles>(low_row, thread % tiles);
#pragma unroll
    for (int i = 0; i < kCount; ++i) dy_to[i] = dy_place<tiles>(row + i * kRowsAtOnce, pack);
  }

  __device__ void next(const Operands &p, uint32_t step) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      copy_async_16(step + dy_to[i], dy + i * kRowsAtOnce * p.dy_stride, i * kRowsAtOnce < dy_left);
    }
    if (threadIdx.x < kRows * tiles) copy_async_16(step + low_to, low, low_left > 0);
    dy += kRows * p.dy_stride, low += kRows * p.low_stride;
    dy_left -= kRows, low_left -= kRows;
  }
};

// b's fragments: terms are the warp's columns of dy, from `column` on. Zeros past the last.
template <int tiles>
__device__ inline void load_b(const Operands &p, int column, uint32_t (&b)[Layout<tiles>::kColumnTiles][tiles][2]) {
  const int lane = threadIdx.x % 32, group = lane / 4, pair = 2 * (lane % 4);
#pragma unroll
  for (int m = 0; m < Layout<tiles>::kColumnTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int term = column + 16 * m + 8 * half + pair;
      const bool inside = term < p.features;  // and the next one: their number is even
      const auto *from = reinterpret_cast<const uint16_t *>(p.b) + term * p.b_stride + group;
#pragma unroll
      for (int j = 0; j < tiles; ++j) {
        const uint32_t one = inside ? from[8 * j] : 0, next = inside ? from[p.b_stride + 8 * j] : 0;
        b[m][j][half] = one | next << 16;
      }
    }
  }
}

// Both products of a step and the warp's columns.
template <int tiles>
__device__ inline void multiply_step(uint32_t step, const uint32_t (&b)[Layout<tiles>::kColumnTiles][tiles][2],
                                     float (&weight)[Layout<tiles>::kColumnTiles][tiles][4], float (&low)[tiles][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t right[tiles][2];  // low's fragments: terms are rows
#pragma unroll
  for (int j = 0; j < tiles; j += 2) {
    const int pack = j + lane / 16;
    uint32_t two[4];
    load_matrices_transposed(two, step + low_place<tiles>(lane % 16, pack < tiles ? pack : j));
    right[j][0] = two[0], right[j][1] = two[1];
    if (j + 1 < tiles) right[j + 1][0] = two[2], right[j + 1][1] = two[3];
  }
#pragma unroll
  for (int m = 0; m < Layout<tiles>::kColumnTiles; ++m) {
    const int pack = (warp * warp_columns(tiles) + 16 * m) / 8;
    uint32_t left[4];
    load_matrices(left, step + dy_place<tiles>(lane % 16, pack + lane / 16));
#pragma unroll
    for (int j = 0; j < tiles; ++j) multiply_fragments(low[j], left, b[m][j][0], b[m][j][1]);
    load_matrices_transposed(left, step + dy_place<tiles>(lane % 8 + lane / 16 * 8, pack + lane / 8 % 2));
#pragma unroll
    for (int j = 0; j < tiles; ++j) multiply_fragments(weight[m][j], left, right[j][0], right[j][1]);
  }
}

// The warps' sums for 16 rows of dlow, added in their order.
template <int tiles>
__device__ inline void add_warps(const float *sums, float *to) {
  constexpr int count = Layout<tiles>::kSums;
#pragma unroll
  for (int i = 0; i < (count + kThreads - 1) / kThreads; ++i) {
    const int at = threadIdx.x + i * kThreads;
    if (count % kThreads != 0 && at >= count) continue;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += sums[warp * count + at];
    to[at] = total;
  }
}

template <int tiles>
__device__ inline uint32_t after(uint32_t step, uint32_t steps) {
  step += Layout<tiles>::kStepBytes;
  return step == steps + Layout<tiles>::kSteps * Layout<tiles>::kStepBytes ? steps : step;
}

template <int tiles>
__global__ void __launch_bounds__(kThreads, tiles <= 2 ? 2 : 1) one_pass_kernel(const Operands p) {
  using L = Layout<tiles>;
  constexpr bool spares_barrier = L::kSumBuffers == 2;
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_kernels_ahead();
  const uint32_t steps = shared_address(shared);
  float *sums = reinterpret_cast<float *>(shared + L::kSteps * L::kStepBytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = blockIdx.y * p.strip, end = begin + p.strip < p.tokens ? begin + p.strip : p.tokens;
  const int count = (end - begin + kRows - 1) / kRows;
  const int first_column = blockIdx.x * L::kColumns + warp * warp_columns(tiles);
  const int row_tiles = (p.tokens + kRows - 1) / kRows, column_tiles = (p.features + 15) / 16;
  float *low_parts = p.low_parts + (static_cast<int64_t>(blockIdx.x) * row_tiles + begin / kRows) * L::kSums;

  Copies<tiles> copies(p, begin, end);
  uint32_t filled = steps, used = steps;  // the step to fill next, and to read
#pragma unroll
  for (int i = 0; i < L::kSteps - 1; ++i, filled = after<tiles>(filled, steps)) {
    if (i < count) copies.next(p, filled);
    commit_copies();
  }
  uint32_t b[L::kColumnTiles][tiles][2];
  load_b<tiles>(p, first_column, b);
  float weight[L::kColumnTiles][tiles][4] = {};

  for (int i = 0; i < count; ++i, used = after<tiles>(used, steps), filled = after<tiles>(filled, steps)) {
    wait_copies_but<L::kSteps - 2>();
    __syncthreads();  // step i is there, everyone is done with step i - 1 and has left its sums
    if (i + L::kSteps - 1 < count) copies.next(p, filled);
    commit_copies();
    if (spares_barrier && i > 0) {
      add_warps<tiles>(sums + (i - 1) % 2 * kWarps * L::kSums, low_parts);
      low_parts += L::kSums;
    }
    float low[tiles][4] = {};
    multiply_step<tiles>(used, b, weight, low);
    float *mine = sums + (i % L::kSumBuffers * kWarps + warp) * L::kSums + 4 * lane;
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      *reinterpret_cast<float4 *>(mine + 128 * j) = make_float4(low[j][0], low[j][1], low[j][2], low[j][3]);
    }
    if (!spares_barrier) {
      __syncthreads();
      add_warps<tiles>(sums, low_parts);
      low_parts += L::kSums;
    }
  }
  if (spares_barrier) {
    __syncthreads();
    add_warps<tiles>(sums + (count - 1) % 2 * kWarps * L::kSums, low_parts);
  }

#pragma unroll
  for (int m = 0; m < L::kColumnTiles; ++m) {
    const int tile = first_column / 16 + m;
    if (tile >= column_tiles) break;
    float *to = p.weight_parts + (static_cast<int64_t>(blockIdx.y) * column_tiles + tile) * L::kSums + 4 * lane;
#pragma unroll
    for (int j = 0; j < tiles; ++j) {
      const float(&sum)[4] = weight[m][j];
      *reinterpret_cast<float4 *>(to + 128 * j) = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
}

struct Parts {
  const float4 *low, *weight;
  int64_t low_fours, weight_fours;  // of one part
  int chunks, strips, tiles, tokens, features;
  int low_blocks;                   // the first blocks add dlow, the others db
  int64_t dlow_stride, db_stride;
  float alpha;
};

constexpr int kFours = 64;                  // that a block of the second kernel adds
constexpr int kGroups = kThreads / kFours;  // of parts, so that all reads are under way at once

__device__ inline void add(float4 &total, const float4 &part) {
  total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
}

__global__ void __launch_bounds__(kThreads) add_parts_kernel(const Parts p, bf16 *dlow, float *db) {
  __shared__ float4 sums[kGroups][kFours];
  wait_for_kernels_ahead();
  const bool is_low = static_cast<int>(blockIdx.x) < p.low_blocks;
  const int mine = threadIdx.x % kFours, group = threadIdx.x / kFours, count = is_low ? p.chunks : p.strips;
  const int64_t at = static_cast<int64_t>(is_low ? blockIdx.x : blockIdx.x - p.low_blocks) * kFours + mine;
  const int64_t fours = is_low ? p.low_fours : p.weight_fours;
  const float4 *from = (is_low ? p.low : p.weight) + at;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (at < fours) {
#pragma unroll 8
    for (int i = group; i < count; i += kGroups) add(sum, from[i * fours]);
  }
  sums[group][mine] = sum;
  __syncthreads();
  if (group != 0 || at >= fours) return;
#pragma unroll
  for (int i = 1; i < kGroups; ++i) add(sum, sums[i][mine]);
  sum = make_float4(p.alpha * sum.x, p.alpha * sum.y, p.alpha * sum.z, p.alpha * sum.w);
  const int lane = at % 32;
  const int64_t row = at / 32 / p.tiles * 16 + lane / 4;
  const int column = static_cast<int>(at / 32 % p.tiles) * 8 + 2 * (lane % 4);
  if (is_low) {
    bf16 *to = dlow + row * p.dlow_stride + column;
    if (row < p.tokens) *reinterpret_cast<uint32_t *>(to) = pack_bf16(sum.x, sum.y);
    if (row + 8 < p.tokens) *reinterpret_cast<uint32_t *>(to + 8 * p.dlow_stride) = pack_bf16(sum.z, sum.w);
    return;
  }
  float *to = db + row * p.db_stride + column;
  const float2 more[2] = {make_float2(sum.x, sum.y), make_float2(sum.z, sum.w)};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= p.features) continue;
    float2 *pair = reinterpret_cast<float2 *>(to + 8 * half * p.db_stride);
    const float2 old = *pair;
    *pair = make_float2(old.x + more[half].x, old.y + more[half].y);
  }
}

// How the work is cut, by shape alone.
struct Cut {
  int tiles;
  int64_t chunks, strips, strip, low_floats, weight_floats;  // floats: of one part
};

Cut cut(const Call &c) {
  Cut result;
  result.tiles = static_cast<int>(c.rank / 8);
  result.chunks = ceil_div(c.features, chunk_columns(result.tiles));
  const int64_t most = ceil_div(c.tokens, kLeastRows), wanted = ceil_div(kBlocks, result.chunks);
  result.strip = ceil_div(ceil_div(c.tokens, wanted < most ? wanted : most), kRows) * kRows;
  result.strips = ceil_div(c.tokens, result.strip);
  result.low_floats = ceil_div(c.tokens, 16) * 16 * c.rank;
  result.weight_floats = ceil_div(c.features, 16) * 16 * c.rank;
  return result;
}

// launch(std::integral_constant<int, rank / 8>)
template <class Launch, int tiles = 1>
void with_tiles(int wanted, Launch &&launch) {
  if constexpr (tiles < kMostTiles) {
    if (wanted != tiles) return with_tiles<Launch, tiles + 1>(wanted, static_cast<Launch &&>(launch));
  }
  launch(std::integral_constant<int, tiles>{});
}

int32_t one_pass_supports(const sg_call *call) {
  Call c;
  if (!read_call(call, &c) || c.dy->dtype != SG_BF16 || c.tokens == 0 || c.features == 0) return 0;
  if (c.rank % 8 != 0 || c.rank == 0 || c.rank > 8 * kMostTiles || c.features % 8 != 0) return 0;
  if (c.tokens > INT32_MAX / 2 || c.features > INT32_MAX / 2) return 0;
  if (row_stride(c.dy) % 8 != 0 || row_stride(c.low) % 8 != 0) return 0;
  if (row_stride(c.dlow) % 2 != 0 || row_stride(c.db) % 2 != 0) return 0;
  return device().shared_memory >= kSharedBytes ? 20 : 0;
}

size_t one_pass_workspace(const sg_call *call) {
  Call c;
  if (!read_call(call, &c)) return 0;
  const Cut k = cut(c);
  return static_cast<size_t>(k.chunks * k.low_floats + k.strips * k.weight_floats) * sizeof(float);
}

bool is_aligned(const sg_tensor *t, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(t->data) % bytes == 0; }

void launch_one_pass(const sg_call *call, const Call &c, cudaError_t *error) {
  const Cut k = cut(c);
  float *low_parts = static_cast<float *>(call->workspace), *weight_parts = low_parts + k.chunks * k.low_floats;
  const Operands operands{data<bf16>(c.dy), data<bf16>(c.b), data<bf16>(c.low), low_parts, weight_parts,
                          row_stride(c.dy), row_stride(c.b), row_stride(c.low), static_cast<int>(c.tokens),
                          static_cast<int>(c.features), static_cast<int>(k.strip)};
  const dim3 grid(static_cast<unsigned>(k.chunks), static_cast<unsigned>(k.strips));
  with_tiles(k.tiles, [&](auto tiles) {
    const auto kernel = one_pass_kernel<decltype(tiles)::value>;
    constexpr int bytes = Layout<decltype(tiles)::value>::kBytes;
    *error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (*error == cudaSuccess) launch_ahead(call, grid, kThreads, bytes, kernel, operands);
  });
  if (*error != cudaSuccess) return;
  const int64_t low_blocks = ceil_div(k.low_floats / 4, kFours);
  const int64_t blocks = low_blocks + ceil_div(k.weight_floats / 4, kFours);
  const Parts parts{reinterpret_cast<const float4 *>(low_parts), reinterpret_cast<const float4 *>(weight_parts),
                    k.low_floats / 4, k.weight_floats / 4, static_cast<int>(k.chunks), static_cast<int>(k.strips),
                    k.tiles, static_cast<int>(c.tokens), static_cast<int>(c.features), static_cast<int>(low_blocks),
                    row_stride(c.dlow), row_stride(c.db), alpha_of(call)};
  launch_ahead(call, static_cast<unsigned>(blocks), kThreads, 0, add_parts_kernel, parts, data<bf16>(c.dlow),
               data<float>(c.db));
}

int32_t one_pass_run(const sg_call *call) {
  Call c;
  if (!read_call(call, &c)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  if (is_aligned(c.dy, 16) && is_aligned(c.low, 16) && is_aligned(c.dlow, 4) && is_aligned(c.db, 8)) {
    cudaError_t error = cudaSuccess;
    launch_one_pass(call, c, &error);
    if (error != cudaSuccess) return fail(call, "%s: CUDA: %s", call->op, cudaGetErrorString(error));
  } else {  // rows that are whole packs, but begin within one
    const float alpha = alpha_of(call);
    tiled_gemm(low_problem(c), alpha, c.dy->data, c.b->data, 0.0f, c.dlow->data, c.dlow->data, nullptr, stream(call));
    tiled_gemm(weight_problem(c), alpha, c.dy->data, c.low->data, 1.0f, c.db->data, c.db->data, nullptr, stream(call));
  }
  return launched(call);
}

constexpr sg_kernel products() {
  sg_kernel k = describe_kernel("low_rank_grad", "cublaslt", -1, products_supports, products_workspace, products_run);
  k.prepare = products_prepare;
  k.release = products_release;
  return k;
}

constexpr sg_kernel low_rank_grad_products = products();
constexpr sg_kernel low_rank_grad_one_pass =
    describe_kernel("low_rank_grad", "one_pass", -1, one_pass_supports, one_pass_workspace, one_pass_run);
SG_REGISTER_KERNEL(low_rank_grad_products);
SG_REGISTER_KERNEL(low_rank_grad_one_pass);

}  // namespace
}  // namespace sg::cuda

// low_rank_grad: what the second half of a low-rank branch hands back, with R a few dozen at most,
//
//   dlow[T, R] = alpha dy[T, N] b[N, R]        db[N, R] += alpha dy^T low[T, R]
//
// 4 T N R FLOPs; floor: the bytes of dy, once. `one_pass` reads dy once, in bf16, for R of 8 to 64. A block walks down
// a strip of rows of a chunk of columns, 16 rows at a time, which come to shared memory several steps ahead. Each warp
// has some of the chunk's columns: their rows of b lie in its registers from the start, their rows of db's sums until
// the end, and what they give to 16 rows of dlow is added up over the warps in shared memory. Blocks of strips below
// one another are a cluster, where the device has such, and add up their sums of db. So there is one part of dlow for
// each chunk and one of db for each cluster, in fp32; at R 16 and T 4096 these are an eighth of dy's bytes (N 4096) or
// less, and stay in the second-level cache: a dy that would drive them out is read as what goes first. A second kernel
// adds the parts in order. What it takes of both kernels besides bytes is latency: the first steps of dy are on their
// way to the cache before the kernel ahead has ended, and so is db.
//
// Everything else is two products of the library (`cublaslt`).
#include <memory>
#include <new>
#include <string>

#include "gemm.h"
#include "gemm_kernels.h"
#include "low_rank_one_pass.cuh"

namespace sg::cuda {
namespace {

using namespace low_rank;

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

// How the work is cut, by shape alone.
struct Cut {
  int tiles;
  int64_t chunks, clusters, strips, strip, low_floats, weight_floats;  // floats: of one part
  int64_t parts_each;  // of db, of a cluster
};

Cut cut(const Call &c) {
  Cut k;
  k.tiles = static_cast<int>(c.rank / 8);
  k.chunks = ceil_div(c.features, chunk_columns(k.tiles));
  const int64_t blocks = cluster_blocks(k.tiles), each = k.chunks * blocks;
  const int64_t more = blocks_at_once(k.tiles) > 1 ? each / 2 : 0;  // rounded, where there is room for it
  const int64_t wanted = (wanted_blocks(k.tiles) + more) / each, most = ceil_div(c.tokens, kLeastRows * blocks);
  k.clusters = wanted < 1 ? 1 : wanted < most ? wanted : most;
  k.strips = k.clusters * blocks;
  k.strip = ceil_div(ceil_div(c.tokens, k.strips), kRows) * kRows;
  k.low_floats = ceil_div(c.tokens, 16) * 16 * c.rank;
  k.weight_floats = ceil_div(c.features, 16) * 16 * c.rank;
  k.parts_each = has_clusters() ? 1 : blocks;
  return k;
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
  return static_cast<size_t>(k.chunks * k.low_floats + k.clusters * k.parts_each * k.weight_floats) * sizeof(float);
}

bool is_aligned(const sg_tensor *t, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(t->data) % bytes == 0; }

void launch_one_pass(const sg_call *call, const Cut &k, const Operands &operands, cudaError_t *error) {
  const dim3 grid(static_cast<unsigned>(k.chunks), static_cast<unsigned>(k.strips));
  with_tiles(k.tiles, [&](auto constant) {
    constexpr int tiles = decltype(constant)::value, bytes = Layout<tiles>::kBytes;
    const auto kernel = one_pass_kernel<tiles>;
    *error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (*error != cudaSuccess) return;
    if (has_clusters()) {
      launch_clusters_ahead(call, grid, cluster_blocks(tiles), kThreads, bytes, kernel, operands);
    } else {
      launch_ahead(call, grid, kThreads, bytes, kernel, operands);
    }
  });
}

void launch_add_parts(const sg_call *call, const Call &c, const Cut &k, const float *low_parts,
                      const float *weight_parts) {
  const auto parts = [&](const float *first, int64_t floats, int64_t count, int64_t each, int64_t rows,
                         const sg_tensor *to) {
    const int64_t fours = floats / 4;
    return Parts{reinterpret_cast<const float4 *>(first), fours, row_stride(to), static_cast<int>(count),
                 static_cast<int>(each), k.tiles, static_cast<int>(rows), static_cast<int>(ceil_div(fours, kFours))};
  };
  const Parts low = parts(low_parts, k.low_floats, k.chunks, 1, c.tokens, c.dlow);
  const Parts weight = parts(weight_parts, k.weight_floats, k.clusters, k.parts_each, c.features, c.db);
  launch_ahead(call, static_cast<unsigned>(low.blocks + weight.blocks), kThreads, 0, add_parts_kernel, low, weight,
               alpha_of(call), data<bf16>(c.dlow), data<float>(c.db));
}

int32_t one_pass_run(const sg_call *call) {
  Call c;
  if (!read_call(call, &c)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  if (is_aligned(c.dy, 16) && is_aligned(c.low, 16) && is_aligned(c.dlow, 4) && is_aligned(c.db, 8)) {
    const Cut k = cut(c);
    float *low_parts = static_cast<float *>(call->workspace), *weight_parts = low_parts + k.chunks * k.low_floats;
    const Operands operands{data<bf16>(c.dy), data<bf16>(c.b), data<bf16>(c.low), low_parts, weight_parts,
                            row_stride(c.dy), row_stride(c.b), row_stride(c.low), static_cast<int>(c.tokens),
                            static_cast<int>(c.features), static_cast<int>(k.strip),
                            2 * c.tokens * c.features > kCacheBytes};
    cudaError_t error = cudaSuccess;
    launch_one_pass(call, k, operands, &error);
    if (error != cudaSuccess) return fail(call, "%s: CUDA: %s", call->op, cudaGetErrorString(error));
    launch_add_parts(call, c, k, low_parts, weight_parts);
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

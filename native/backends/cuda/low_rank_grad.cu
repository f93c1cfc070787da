// low_rank_grad: what the second halves of low-rank branches hand back, with R a few dozen at most; for each branch
//
//   dlow[T, R] = alpha dy[T, N] b[N, R]        db[N, R] += alpha dy^T low[T, R]
//
// 4 T N R FLOPs; floor: the bytes of dy, once. On compute capability 9.0 that is `tiles` (low_rank_grad_tiles.cu); here is
// what runs everywhere, a branch at a time. `one_pass` reads dy once, in bf16, for R of 8 to 64. A block walks down
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
#include <algorithm>
#include <memory>
#include <new>
#include <string>

#include "gemm.h"
#include "gemm_kernels.h"
#include "low_rank_call.h"
#include "low_rank_one_pass.cuh"

namespace sg::cuda {
namespace {

using namespace low_rank;

// ---- two products

GemmProblem low_problem(const Branch &c) {
  GemmProblem p;
  p.m = c.tokens, p.n = c.rank, p.k = c.features;
  p.ab_dtype = p.d_dtype = c.dy.dtype;
  p.lda = row_stride(c.dy), p.ldb = row_stride(c.b), p.ldc = p.ldd = row_stride(c.dlow);
  return p;
}

GemmProblem weight_problem(const Branch &c) {
  GemmProblem p;
  p.m = c.features, p.n = c.rank, p.k = c.tokens;
  p.transpose_a = p.add_c = true;
  p.ab_dtype = c.dy.dtype, p.d_dtype = SG_F32;
  p.lda = row_stride(c.dy), p.ldb = row_stride(c.low), p.ldc = p.ldd = row_stride(c.db);
  return p;
}

struct Products {
  std::unique_ptr<Gemm> low[kMostBranches], weight[kMostBranches];
};

int32_t products_supports(const sg_call *call) {
  Call c;
  return read_call(call, &c) ? 10 : 0;
}

size_t products_workspace(const sg_call *call) {
  Call c;
  if (!read_call(call, &c)) return 0;
  size_t most = 0;
  for (int i = 0; i < c.branches; ++i) {
    const Branch &branch = c.branch[i];
    most = std::max({most, gemm_workspace_bytes(low_problem(branch)), gemm_workspace_bytes(weight_problem(branch))});
  }
  return most;
}

int32_t products_prepare(const sg_call *call, void **state) {
  Call c;
  if (!read_call(call, &c)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  std::unique_ptr<Products> products(new (std::nothrow) Products);
  if (products == nullptr) return fail(call, "%s: out of memory", call->op);
  for (int i = 0; i < c.branches; ++i) {
    std::string error;
    products->low[i] = Gemm::plan(low_problem(c.branch[i]), nullptr, &error);
    if (products->low[i] != nullptr) products->weight[i] = Gemm::plan(weight_problem(c.branch[i]), nullptr, &error);
    if (products->weight[i] == nullptr) return fail(call, "%s", error.c_str());
  }
  *state = products.release();
  return SG_OK;
}

void products_release(void *state) { delete static_cast<Products *>(state); }

int32_t products_run(const sg_call *call) {
  Call c;
  if (!read_call(call, &c)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  const auto *products = static_cast<const Products *>(call->state);
  const float alpha = alpha_of(call);
  for (int i = 0; i < c.branches; ++i) {
    const Branch &b = c.branch[i];
    const int32_t result = products->low[i]->run(call, alpha, b.dy.data, b.b.data, nullptr, b.dlow.data, nullptr,
                                                 call->workspace);
    if (result != SG_OK) return result;
    const int32_t other = products->weight[i]->run(call, alpha, b.dy.data, b.low.data, b.db.data, b.db.data, nullptr,
                                                   call->workspace);
    if (other != SG_OK) return other;
  }
  return SG_OK;
}

// ---- one pass

// How the work is cut, by shape alone.
struct Cut {
  int tiles;
  int64_t chunks, clusters, strips, strip, low_floats, weight_floats;  // floats: of one part
  int64_t parts_each;  // of db, of a cluster
};

Cut cut(const Branch &c) {
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
  if (!read_call(call, &c) || c.branch[0].dy.dtype != SG_BF16 || c.tokens == 0 || c.tokens > INT32_MAX / 2) return 0;
  if (c.rank % 8 != 0 || c.rank == 0 || c.rank > 8 * kMostTiles) return 0;
  for (int i = 0; i < c.branches; ++i) {
    const Branch &branch = c.branch[i];
    if (branch.features == 0 || branch.features % 8 != 0 || branch.features > INT32_MAX / 2) return 0;
    if (row_stride(branch.db) % 2 != 0) return 0;
  }
  const Branch &any = c.branch[0];
  if (row_stride(any.dy) % 8 != 0 || row_stride(any.low) % 8 != 0 || row_stride(any.dlow) % 2 != 0) return 0;
  return device().shared_memory >= kSharedBytes ? 20 : 0;
}

size_t one_pass_workspace(const sg_call *call) {
  Call c;
  if (!read_call(call, &c)) return 0;
  int64_t most = 0;
  for (int i = 0; i < c.branches; ++i) {
    const Cut k = cut(c.branch[i]);
    most = std::max(most, k.chunks * k.low_floats + k.clusters * k.parts_each * k.weight_floats);
  }
  return static_cast<size_t>(most) * sizeof(float);
}

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

int32_t one_pass_branch(const sg_call *call, const Branch &c) {
  if (is_aligned(c.dy, 16) && is_aligned(c.low, 16) && is_aligned(c.dlow, 4) && is_aligned(c.db, 8)) {
    const Cut k = cut(c);
    float *low_parts = static_cast<float *>(call->workspace), *weight_parts = low_parts + k.chunks * k.low_floats;
    const Operands operands{data<bf16>(&c.dy), data<bf16>(&c.b), data<bf16>(&c.low), low_parts, weight_parts,
                            row_stride(c.dy), row_stride(c.b), row_stride(c.low), static_cast<int>(c.tokens),
                            static_cast<int>(c.features), static_cast<int>(k.strip),
                            2 * c.tokens * c.features > kCacheBytes};
    cudaError_t error = cudaSuccess;
    launch_one_pass(call, k, operands, &error);
    if (error != cudaSuccess) return fail(call, "%s: CUDA: %s", call->op, cudaGetErrorString(error));
    SumList sums;
    sums.add_low(low_parts, k.low_floats / 4, k.chunks, c);
    sums.add_weight(weight_parts, k.weight_floats / 4, k.clusters, k.parts_each, c);
    launch_add_parts(call, sums);
  } else {  // rows that are whole packs, but begin within one
    run_tiled(call, c);
  }
  return launched(call);
}

int32_t one_pass_run(const sg_call *call) {
  Call c;
  if (!read_call(call, &c)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  for (int i = 0; i < c.branches; ++i) {
    const int32_t result = one_pass_branch(call, c.branch[i]);
    if (result != SG_OK) return result;
  }
  return SG_OK;
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

void low_rank::run_tiled(const sg_call *call, const Branch &c) {
  const float alpha = alpha_of(call);
  const void *dy = c.dy.data;
  tiled_gemm(low_problem(c), alpha, dy, c.b.data, 0.0f, c.dlow.data, c.dlow.data, nullptr, stream(call));
  tiled_gemm(weight_problem(c), alpha, dy, c.low.data, 1.0f, c.db.data, c.db.data, nullptr, stream(call));
}

}  // namespace sg::cuda

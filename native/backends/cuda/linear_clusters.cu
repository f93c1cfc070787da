// linear for 9 to 64 tokens and a bf16 weight: y[T, N] = alpha x[T, K] weight[N, K]^T + bias[N] + addend[T, N], x in
// bf16, y in bf16 or f32. What decoding some tens of sequences is made of.
//
// Floor: the bytes of the weight, 1 to 8 us, of which products that wait for one another lose as much again at both
// ends. So all bytes are asked for at once, in one wave: a cluster of up to eight blocks makes 128 columns of y, each
// block from a part of K. Its eight warps take 16 rows of the weight each, from memory straight into the fragments of
// mma.m16n8k16, 8 KB a warp under way; they share x's part, which lies in shared memory whole. A thread takes 16
// neighbouring bytes of either operand where the instruction's layout would have it take 4, so the terms of a sum only
// change places. The weight is brought to the second-level cache while the kernels ahead still run.
//
// Each block writes its sums to that one of the cluster which finishes these columns; it adds them in the order of the
// parts. A result's bits depend on its token, its weight row, N and K.
#include <algorithm>

#include "gemm_kernels.h"
#include "linear_clusters.cuh"

namespace sg::cuda {
namespace {

using namespace clusters;

constexpr int kLeastTokens = 9;                 // of which this is the fastest
constexpr int64_t kMostElements = 16 << 20;     // of a weight; with more, the library's kernels are at its bytes

struct Problem {
  Product product;
  const void *bias, *addend;
  void *y;
  int64_t addend_stride, y_stride;  // elements from token to token
  float alpha;
  bool packs;  // four elements of bias, addend and y at a time
};

// The columns of y that are this block's to finish, all tokens; four of one token at a time.
template <bool packs, class Y, int tiles>
__device__ inline void finish(const Problem &p, const Exchange<tiles> &exchange) {
  const auto *bias = static_cast<const Y *>(p.bias), *addend = static_cast<const Y *>(p.addend);
  auto *y = static_cast<Y *>(p.y);
  for (int item = static_cast<int>(threadIdx.x); item < exchange.items(); item += kThreads) {
    const Place place = exchange.place(item);
    const int64_t row = place.row, token = place.token;
    const int64_t left = token < p.product.tokens ? p.product.n - row : 0;
    float added[4] = {}, before[4] = {};
    if (bias != nullptr) load_upto<4, packs>(bias + row, left, added);
    if (addend != nullptr) load_upto<4, packs>(addend + token * p.addend_stride + row, left, before);
    if (item < kThreads) exchange.await();
    if (left > 0) {
      const float4 sum = exchange.sum(item);
      const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
      float result[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) result[i] = fmaf(p.alpha, sums[i], added[i]) + before[i];
      store_upto<4, packs>(y + token * p.y_stride + row, left, result);
    }
  }
}

template <int tiles, class Y>
__global__ void __launch_bounds__(kThreads, 2) linear_clusters(const Problem p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char shared[];
  const Share share(p.product);
  const WeightRows rows(p.product, share);
  unsigned char *const shared_terms = shared + terms_offset(tiles);
  const Terms<tiles> terms(p.product, share, shared_terms);
  rows.bring(p.product, share);
  const Exchange<tiles> exchange(p.product, shared);
  exchange.begin();
  wait_for_kernels_ahead();

  terms.copy(p.product, share);
  float sums[tiles][2][4] = {};
  multiply_share<tiles>(rows, share, shared_terms, [&] { exchange.begin_to_send(); }, sums);
  exchange.send(sums);
  with_whole(p.packs, [&](auto packs) { finish<decltype(packs)::value, Y>(p, exchange); });
#endif
}

bool read_clusters(const sg_call *call, Problem *problem) {
  FewProblem p;
  if (!has_clusters() || !read_few(call, &p) || p.tokens > 16 * kMostTiles) return false;
  const sg_tensor *weight = input(call, 1), *bias = input(call, 2), *addend = input(call, 3), *y = output(call, 0);
  if (weight->dtype != SG_BF16 || !has_dense_rows(weight) || (bias != nullptr && bias->dtype != y->dtype)) return false;
  const int64_t x_stride = p.tokens > 1 ? p.x_stride : p.k, weight_stride = p.n > 1 ? weight->strides[0] : p.k;
  if (p.k % 8 != 0 || x_stride % 8 != 0 || weight_stride % 8 != 0 || p.n > INT32_MAX - kRows) return false;
  const Cut pieces = cut(p.n, p.k);
  if (shared_bytes(tiles_of(p.tokens), pieces.part) > device().shared_memory) return false;
  *problem = {{data<const bf16>(input(call, 0)), data<const bf16>(weight), x_stride, weight_stride, p.tokens,
               static_cast<int>(p.n), static_cast<int>(p.k), pieces},
              p.bias,
              addend != nullptr ? addend->data : nullptr,
              y->data,
              p.addend_stride,
              p.y_stride,
              p.alpha,
              false};
  return true;
}

int32_t supports(const sg_call *call) {
  Problem p;
  if (!read_clusters(call, &p)) return 0;
  return p.product.tokens >= kLeastTokens && int64_t{p.product.n} * p.product.k <= kMostElements ? 25 : 1;
}

template <class Y>
bool packs_ends(const Problem &p) {
  return can_pack<4>(static_cast<const Y *>(p.y), p.y_stride) &&
         can_pack<4>(static_cast<const Y *>(p.addend), p.addend_stride) &&
         can_pack<4>(static_cast<const Y *>(p.bias), 0);
}

template <class Y>
int32_t launch(const sg_call *call, Problem p) {
  p.packs = packs_ends<Y>(p);
  return with_tiles(tiles_of(p.product.tokens), [&](auto tiles) {
    return launch_product(call, p.product, tiles, linear_clusters<decltype(tiles)::value, Y>, p);
  });
}

// Rows that are whole packs, but begin within one.
int32_t run_tiled(const sg_call *call, const Problem &p) {
  GemmProblem product;
  product.m = p.product.tokens, product.n = p.product.n, product.k = p.product.k;
  product.transpose_b = true;
  product.d_dtype = output(call, 0)->dtype;
  product.lda = p.product.x_stride, product.ldb = p.product.weight_stride;
  product.ldc = p.addend_stride, product.ldd = p.y_stride;
  product.add_c = p.addend != nullptr, product.has_bias = p.bias != nullptr;
  tiled_gemm(product, p.alpha, p.product.x, p.product.weight, 1.0f, p.addend, p.y, p.bias, stream(call));
  return launched(call);
}

int32_t run(const sg_call *call) {
  Problem p;
  if (!read_clusters(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  if (p.product.tokens == 0 || p.product.n == 0) return SG_OK;
  if (!is_aligned<8>(p.product.x) || !is_aligned<8>(p.product.weight)) return run_tiled(call, p);
  return output(call, 0)->dtype == SG_BF16 ? launch<bf16>(call, p) : launch<float>(call, p);
}

constexpr sg_kernel kernel = describe_kernel("linear", "clusters", 3, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda

// linear for 1 to 8 tokens and a bf16 weight: y[T, N] = alpha x[T, K] weight[N, K]^T + bias[N] + addend[T, N], x in
// bf16, y in bf16 or f32. What decoding a few sequences is made of.
//
// Floor: the bytes of the weight. A block takes 16 rows of it, its eight warps each a part of every row, with 4 to 8 KB a
// warp under way and nothing in between: the weight goes from memory into the fragments of mma.m16n8k16, whose 8 columns
// are the tokens, as in gemm_narrow.cu. A thread takes 16 neighbouring bytes where the instruction's own layout would have
// it take 4; x is read the same way, so the terms of a sum only change places. The blocks' first bytes are brought to the
// second-level cache while the kernels ahead still run.
//
// A result's bits depend on its token, its weight row and K, not on how many tokens there are: warps take groups of
// 128 terms in turn, and their sums are added in order.
#include "linear_few_bf16.cuh"

namespace sg::cuda {
namespace {

template <bool packed, int blocks, class Y>
__global__ void __launch_bounds__(kFewThreads, blocks)
    linear_few_kernel(FewProblem p, int64_t weight_stride, const bf16 *x, const bf16 *weight, const Y *addend, Y *y) {
  __shared__ float partial[kFewWarps][kFewRows * kFewStride];
  const FewSlice slice(p.tokens);
  const int64_t first = slice.tile * kFewRows;
  const int group = lane_index() / 4, k = static_cast<int>(p.k);
  if (packed && threadIdx.x < kFewRows && first + threadIdx.x < p.n) {
    const int64_t bytes = min(2 * p.k, kBytesAhead);
    bring_closer(weight + (first + threadIdx.x) * weight_stride, static_cast<uint32_t>(bytes));
  }
  wait_for_kernels_ahead();

  const bf16 *const rows[2] = {weight + min(first + group, p.n - 1) * weight_stride,
                               weight + min(first + 8 + group, p.n - 1) * weight_stride};
  const int token = slice.first_token + group;
  const bool is_token = token < p.tokens;
  x += is_token ? token * p.x_stride : 0;
  float sums[4] = {};
  multiply_few<packed, blocks>(rows, k, [&](int at) {
    return load_terms<packed, false>(x + at, is_token ? k - at : 0);
  }, sums);
  leave_sums(sums, partial[threadIdx.x / 32]);
  __syncthreads();
  finish_few<kFewRows>(p, first, slice.first_token, partial, addend, y);
}

int32_t supports(const sg_call *call) {
  FewProblem p;
  if (!read_few(call, &p)) return 0;
  const sg_tensor *weight = input(call, 1);
  if (weight->dtype != SG_BF16 || !has_dense_rows(weight)) return 0;
  return few_score(p.tokens, p.k % 8 == 0 && (weight->shape[0] <= 1 || weight->strides[0] % 8 == 0));
}

template <class Y>
void launch(const sg_call *call, const FewProblem &p) {
  const sg_tensor *weight = input(call, 1);
  const bf16 *x = data<const bf16>(input(call, 0)), *rows = data<const bf16>(weight);
  const int64_t stride = weight->strides[0];
  const bool packed =
      p.k % 8 == 0 && can_pack<8>(x, p.tokens > 1 ? p.x_stride : 0) && can_pack<8>(rows, p.n > 1 ? stride : 0);
  const int64_t blocks = ceil_div(p.n, kFewRows) * few_slices(p.tokens);
  const auto kernel = !packed                                         ? linear_few_kernel<false, kFewBlocks, Y>
                      : few_blocks_of_unit(blocks) == kMostFewBlocks ? linear_few_kernel<true, kMostFewBlocks, Y>
                                                                      : linear_few_kernel<true, kFewBlocks, Y>;
  launch_ahead(call, static_cast<unsigned>(blocks), kFewThreads, 0, kernel, p, stride, x, rows,
               data<const Y>(input(call, 3)), data<Y>(output(call, 0)));
}

int32_t run(const sg_call *call) {
  FewProblem p;
  if (!read_few(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  if (p.tokens == 0 || p.n == 0) return SG_OK;
  with_type(output(call, 0), [&]<class Y>(Y) { launch<Y>(call, p); });
  return launched(call);
}

constexpr sg_kernel kernel = row_invariant(describe_kernel("linear", "few", 3, supports, nullptr, run));
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda

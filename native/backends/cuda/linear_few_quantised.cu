// linear for 1 to 8 tokens and a weight in blocks: y[T, N] = alpha x[T, K] weight[N, K]^T + bias[N] + addend[T, N],
// x in bf16, y in bf16 or f32.
//
// Floor: the bytes of the blocks; their decoding, at some four instructions for each weight and lane, costs about as
// much for four bits. As linear_few.cu, with blocks that are decoded to bf16 in registers where the bf16 weight is
// loaded: a lane takes the 16 elements that quant.cuh hands out at once, in two runs of eight, and the same elements of
// x. All bytes of a block's rows, which lie together, are asked for at once, ahead of the kernels ahead, so what is
// decoded comes from the second-level cache.
//
// A result's bits depend on its token, its weight row and K, not on how many tokens there are.
#include "attention_ptx.cuh"
#include "linear_few.cuh"
#include "linear_few_ptx.cuh"
#include "quant.cuh"

namespace sg::cuda {
namespace {

constexpr int kRows = 16;
constexpr int64_t kBytesAhead = 128 << 10;
constexpr int kPartElements = 16;  // that a lane takes at once

struct BlockRows {
  const uint8_t *blocks;
  int64_t row_bytes;
};

// Two runs of eight elements in bf16.
struct DecodedRuns {
  uint4 at[2];
};

template <int32_t format, bool fast>
__device__ __forceinline__ DecodedRuns decode_runs(const uint8_t *row, int part, int (&offsets)[2]) {
  using D = Decoder<format>;
  constexpr int kParts = D::kElements / kPartElements;
  const int block = part / kParts;
  DecodedRuns runs;
  int run = 0;
  D::template decode<fast>(row + static_cast<int64_t>(block) * D::kBytes, part % kParts,
                           [&](int offset, const float(&values)[8]) {
                             offsets[run] = block * D::kElements + offset;
                             runs.at[run++] = {pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
                                               pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7])};
                           });
  return runs;
}

template <bool fast>
__device__ inline uint4 load_run(const bf16 *x) {
  if constexpr (fast) return *reinterpret_cast<const uint4 *>(x);
  uint16_t elements[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) elements[i] = reinterpret_cast<const uint16_t *>(x)[i];
  uint4 word;
  memcpy(&word, elements, sizeof(word));
  return word;
}

// sums += two rows times the tokens over `steps` parts of this lane, from `part` on and `stride` apart; `whole`: all of
// them are there.
template <int32_t format, bool fast, int steps, bool whole>
__device__ __forceinline__ void add_parts(const uint8_t *low_row, const uint8_t *high_row, const bf16 *x, bool is_token,
                                          int part, int stride, int parts, float (&sums)[4]) {
  DecodedRuns low[steps]{}, high[steps]{}, terms[steps]{};
#pragma unroll
  for (int i = 0; i < steps; ++i) {
    const int at = part + i * stride;
    if (!whole && at >= parts) continue;
    int offsets[2];
    low[i] = decode_runs<format, fast>(low_row, at, offsets);
    high[i] = decode_runs<format, fast>(high_row, at, offsets);
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      if (is_token) terms[i].at[run] = load_run<fast>(x + offsets[run]);
    }
  }
#pragma unroll
  for (int i = 0; i < steps; ++i) {
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const uint4 a = low[i].at[run], b = high[i].at[run], c = terms[i].at[run];
      multiply_fragments(sums, {a.x, b.x, a.y, b.y}, c.x, c.y);
      multiply_fragments(sums, {a.z, b.z, a.w, b.w}, c.z, c.w);
    }
  }
}

// `fast`: blocks lie as quant.cuh likes it, and rows of x can be moved 16 bytes at a time.
template <int32_t format, bool fast>
__global__ void __launch_bounds__(kFewThreads, 3)
    linear_few_blocks(FewProblem p, BlockRows weight, const bf16 *x, const void *addend, void *y, bool to_bf16) {
  __shared__ float partial[kFewWarps][kRows * kFewStride];
  const FewSlice slice(p.tokens);
  const int64_t first = slice.tile * kRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = lane_index(), group = lane / 4;
  if (threadIdx.x == 0) {
    // From a multiple of 16 bytes, and not past the end.
    const uintptr_t begin = reinterpret_cast<uintptr_t>(weight.blocks + first * weight.row_bytes) / 16 * 16;
    const int64_t bytes = min(min(p.n - first, static_cast<int64_t>(kRows)) * weight.row_bytes, kBytesAhead);
    bring_closer(reinterpret_cast<const void *>(begin), static_cast<uint32_t>(bytes / 16 * 16));
  }
  wait_for_kernels_ahead();

  const uint8_t *const low_row = weight.blocks + min(first + group, p.n - 1) * weight.row_bytes;
  const uint8_t *const high_row = weight.blocks + min(first + group + 8, p.n - 1) * weight.row_bytes;
  const int token = slice.first_token + group;
  const bool is_token = token < p.tokens;
  x += is_token ? token * p.x_stride : 0;
  const int parts = static_cast<int>(p.k / kPartElements);
  float sums[4] = {};
  constexpr int kStride = 4 * kFewWarps;
  int begin = 4 * warp;
  for (; begin + kStride + 4 <= parts; begin += 2 * kStride) {
    add_parts<format, fast, 2, true>(low_row, high_row, x, is_token, begin + lane % 4, kStride, parts, sums);
  }
  for (; begin < parts; begin += kStride) {
    add_parts<format, fast, 1, false>(low_row, high_row, x, is_token, begin + lane % 4, kStride, parts, sums);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    partial[warp][(group + 8 * (i / 2)) * kFewStride + 2 * (lane % 4) + i % 2] = sums[i];
  }
  __syncthreads();
  if (to_bf16) {
    finish_few<kRows>(p, first, slice.first_token, partial, static_cast<const bf16 *>(addend),
                      static_cast<bf16 *>(y));
  } else {
    finish_few<kRows>(p, first, slice.first_token, partial, static_cast<const float *>(addend),
                      static_cast<float *>(y));
  }
}

bool is_format(int32_t dtype) { return with_format(dtype, [](auto) {}); }

int32_t supports(const sg_call *call) {
  FewProblem p;
  if (!read_few(call, &p)) return 0;
  const sg_tensor *weight = input(call, 1);
  return is_format(weight->dtype) && is_dense(weight) ? few_score(p.tokens, true) : 0;
}

int32_t run(const sg_call *call) {
  FewProblem p;
  if (!read_few(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  if (p.tokens == 0 || p.n == 0) return SG_OK;
  const sg_tensor *weight = input(call, 1), *addend = input(call, 3), *y = output(call, 0);
  const bf16 *x = data<const bf16>(input(call, 0));
  const bool packed_x = can_pack<8>(x, p.tokens > 1 ? p.x_stride : 0);
  with_format(weight->dtype, [&](auto which) {
    constexpr int32_t format = decltype(which)::value;
    using D = Decoder<format>;
    const BlockRows rows = {data<const uint8_t>(weight), p.k / D::kElements * D::kBytes};
    const bool fast = packed_x && reinterpret_cast<uintptr_t>(rows.blocks) % D::kAlignment == 0;
    const auto kernel = fast ? linear_few_blocks<format, true> : linear_few_blocks<format, false>;
    const int64_t blocks = ceil_div(p.n, kRows) * few_slices(p.tokens);
    launch_ahead(call, static_cast<unsigned>(blocks), kFewThreads, 0, kernel, p, rows, x,
                 addend == nullptr ? static_cast<const void *>(nullptr) : addend->data, y->data, y->dtype == SG_BF16);
  });
  return launched(call);
}

constexpr sg_kernel kernel = row_invariant(describe_kernel("linear", "few_blocks", 3, supports, nullptr, run));
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda

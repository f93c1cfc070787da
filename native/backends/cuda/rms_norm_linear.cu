// rms_norm_linear for a few tokens and a bf16 weight: y[T, N] = alpha rms_norm(x[T, K]) weight[N, K]^T + bias[N], or
// y[T, N / 2] = activation(gate) * up of its two halves; x and y in f32 or bf16. See surogate_core/ops/rms_norm_linear.py.
//
// linear_few.cu with two ends. Ahead, a block multiplies its tokens by the norm's weight, rounds them to bf16 in shared
// memory, and adds up their squares, while its first rows of the weight are on their way; a token's sums are scaled by its
// norm at the end, so that nothing waits for that. As that is done once for all tiles of 16 rows that a block makes, there
// are only as many blocks as the device holds at a time. And a tile's rows are eight of the gate and the eight of what it
// lets through that belong to them, so that the block can multiply the two. Two kernels less in each half of a layer, at 2
// to 3 us each, are worth more than that every block norms its tokens.
//
// A result's bits depend on its token, its weight row and K, not on how many tokens there are.
#include <algorithm>

#include "linear_few_bf16.cuh"
#include "rms_norm_linear.cuh"

namespace sg::cuda {
namespace {

constexpr int kMostShared = 200 << 10;         // bytes of normed tokens
constexpr int kSharedOfUnit = 220 << 10;       // of all blocks of a multiprocessor

struct Problem : NormedProblem {
  int slice;   // tokens of a block
  int padded;  // elements from one normed token to the next in shared memory
};

// From one normed token to the next there are half as many bytes more than a multiple of what the banks hold: lanes that
// read two tokens at a time find them in different banks.
inline int padded_terms(int64_t k) { return static_cast<int>(ceil_div(k, kGroup) * kGroup) + 32; }

// Row i of a tile of 16, of which `kColumns` columns of y are made.
template <bool gated>
struct Tile {
  static constexpr int kColumns = gated ? 8 : 16;
  int64_t first, count;  // column of y; count: of all tiles

  __device__ Tile(int64_t tile, int64_t n) : first(tile * kColumns), count(gated ? n / 2 : n) {}
  __device__ int64_t weight_row(int i) const {
    if constexpr (!gated) return min(first + i, count - 1);
    return min(first + i % 8, count - 1) + (i < 8 ? 0 : count);
  }
};

template <bool gated>
__device__ inline void bring_tile(const Problem &p, const bf16 *weight, const Tile<gated> &tile) {
  if (threadIdx.x >= kFewRows) return;
  const int64_t bytes = min(2 * p.product.k, kBytesAhead);
  bring_closer(weight + tile.weight_row(static_cast<int>(threadIdx.x)) * p.weight_stride, static_cast<uint32_t>(bytes));
}

// terms[t][i] = bf16(x[t][i] * norm weight[i]), zeros from K on; squares[warp][t] of what the warp has taken.
template <bool packed, class X>
__device__ inline void norm_tokens(const Problem &p, const X *x, int count, bf16 *terms,
                                   float (&squares)[kFewWarps][kFewTokens]) {
  constexpr int kTogether = 16 / static_cast<int>(sizeof(X)) / 2;  // tokens whose loads are under way at once
  const int k = static_cast<int>(p.product.k);
  float sums[kFewTokens] = {};
  for (int at = 8 * static_cast<int>(threadIdx.x); at < p.padded - 32; at += 8 * kFewThreads) {
    float factors[8] = {};
    if constexpr (packed) {
      if (at < k) p.norm.load_pack<8>(at, factors);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float factor[1] = {};
        if (at + i < k) p.norm.load_pack<1>(at + i, factor);
        factors[i] = factor[0];
      }
    }
#pragma unroll
    for (int first = 0; first < kFewTokens; first += kTogether) {
      if (first >= count) break;
      Pack<X, 8> packs[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        packs[j] = {};
        const X *from = x + (first + j) * p.product.x_stride + at;
        if constexpr (packed) {
          if (first + j < count && at < k) packs[j] = load_pack<8>(from);
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (first + j < count && at + i < k) packs[j].at[i] = from[i];
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (first + j >= count) break;
        float values[8];
        to_floats<8>(packs[j], values);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sums[first + j] = fmaf(values[i], values[i], sums[first + j]);
          values[i] *= factors[i];
        }
        *reinterpret_cast<uint4 *>(terms + (first + j) * p.padded + at) = {
            pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]), pack_bf16(values[4], values[5]),
            pack_bf16(values[6], values[7])};
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kFewTokens; ++t) {
    const float square = warp_sum(sums[t]);
    if (lane_index() == 0) squares[threadIdx.x / 32][t] = square;
  }
}

template <bool gated, bool packed, int blocks, class X>
__global__ void __launch_bounds__(kFewThreads, blocks)
    rms_norm_linear_few(Problem p, int64_t tiles, const X *x, const bf16 *weight, void *y, bool to_bf16) {
  extern __shared__ __align__(16) bf16 terms[];
  __shared__ float partial[2][kFewWarps][kFewRows * kFewStride], squares[kFewWarps][kFewTokens];
  const FewProblem &product = p.product;
  const int group = lane_index() / 4, k = static_cast<int>(product.k), slices = (product.tokens + p.slice - 1) / p.slice;
  const int first_token = static_cast<int>(blockIdx.x % slices) * p.slice;
  const int count = min(p.slice, product.tokens - first_token);
  const int64_t step = gridDim.x / slices;
  int64_t index = blockIdx.x / slices;
  if constexpr (packed) bring_tile(p, weight, Tile<gated>(index, product.n));
  wait_for_kernels_ahead();
  norm_tokens<packed>(p, x + first_token * product.x_stride, count, terms, squares);
  __syncthreads();
  const bf16 *const mine = terms + group * p.padded;

  for (int buffer = 0; index < tiles; index += step, buffer ^= 1) {
    const Tile<gated> tile(index, product.n);
    if constexpr (packed) {
      if (index + step < tiles) bring_tile(p, weight, Tile<gated>(index + step, product.n));
    }
    const bf16 *const rows[2] = {weight + tile.weight_row(group) * p.weight_stride,
                                 weight + tile.weight_row(group + 8) * p.weight_stride};
    float sums[4] = {};
    multiply_few<packed, blocks>(rows, k, [&](int at) {
      return group < count && at < k ? *reinterpret_cast<const uint4 *>(mine + at) : uint4{};
    }, sums);
    leave_sums(sums, partial[buffer][threadIdx.x / 32]);
    __syncthreads();  // and the sums of the tile before have been read by all who come this far

    const int own = static_cast<int>(threadIdx.x) % Tile<gated>::kColumns;
    const int token = static_cast<int>(threadIdx.x) / Tile<gated>::kColumns;
    const int64_t column = tile.first + own;
    if (token >= count || column >= tile.count) continue;
    float square = 0.0f;
#pragma unroll
    for (int w = 0; w < kFewWarps; ++w) square += squares[w][token];
    const float factor = product.alpha * rsqrtf(square / static_cast<float>(k) + p.eps);
    const auto made = [&](int row, int64_t weight_row) {
      const float sum = factor * sum_of_warps<kFewRows>(partial[buffer], row, token);
      return product.bias != nullptr ? sum + bias_at(product, weight_row) : sum;
    };
    float value = made(own, column);
    if constexpr (gated) value = activated(p.activation, value) * made(own + 8, tile.count + column);
    const int64_t to = (first_token + token) * product.y_stride + column;
    if (to_bf16) {
      static_cast<bf16 *>(y)[to] = from_float<bf16>(value);
    } else {
      static_cast<float *>(y)[to] = value;
    }
  }
}

bool read_few_normed(const sg_call *call, Problem *p) {
  if (!read_normed(call, p)) return false;
  const int64_t tokens = p->product.tokens, n = p->product.n;
  if (ceil_div(tokens, kFewTokens) * ceil_div(n, 8) >= INT32_MAX) return false;
  p->padded = padded_terms(p->product.k);
  p->slice = static_cast<int>(std::min<int64_t>(kFewTokens, kMostShared / (2 * p->padded)));
  return p->slice > 0;
}

int32_t supports(const sg_call *call) {
  Problem p;
  return read_few_normed(call, &p) ? 10 : 0;
}

// Bytes of a block's shared memory: of its normed tokens, and all.
int normed_bytes(const Problem &p) { return 2 * p.padded * std::min(p.slice, p.product.tokens); }
int block_bytes(const Problem &p) {
  constexpr int kSums = 2 * kFewWarps * kFewRows * kFewStride * static_cast<int>(sizeof(float)), kOther = 2 << 10;
  return normed_bytes(p) + kSums + kOther;
}

template <bool gated, bool packed, int most, class X>
void launch_blocks(const sg_call *call, const Problem &p) {
  const FewProblem &product = p.product;
  const sg_tensor *y = output(call, 0);
  const int64_t tiles = ceil_div(gated ? product.n / 2 : product.n, Tile<gated>::kColumns);
  const int64_t slices = ceil_div(product.tokens, p.slice);
  const int64_t of_unit = std::clamp(kSharedOfUnit / block_bytes(p), 1, most);
  const int shared = normed_bytes(p);
  const int64_t blocks = std::min(tiles, ceil_div(of_unit * device().units, slices)) * slices;
  const auto kernel = rms_norm_linear_few<gated, packed, most, X>;
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  launch_ahead(call, static_cast<unsigned>(blocks), kFewThreads, static_cast<size_t>(shared), kernel, p, tiles,
               data<const X>(input(call, 0)), data<const bf16>(input(call, 2)), y->data, y->dtype == SG_BF16);
}

template <bool gated, class X>
void launch(const sg_call *call, const Problem &p) {
  const FewProblem &product = p.product;
  const bool packed = product.k % 8 == 0 &&
                      can_pack<8>(data<const X>(input(call, 0)), product.tokens > 1 ? product.x_stride : 0) &&
                      can_pack<8>(data<const bf16>(input(call, 2)), product.n > 1 ? p.weight_stride : 0) &&
                      p.norm.packable<8>();
  if (!packed) {
    launch_blocks<gated, false, kFewBlocks, X>(call, p);
  } else if (few_blocks_of_unit(ceil_div(product.n, kFewRows)) == kMostFewBlocks &&
             kMostFewBlocks * block_bytes(p) <= kSharedOfUnit) {
    launch_blocks<gated, true, kMostFewBlocks, X>(call, p);
  } else {
    launch_blocks<gated, true, kFewBlocks, X>(call, p);
  }
}

int32_t run(const sg_call *call) {
  Problem p;
  if (!read_few_normed(call, &p)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  if (p.product.tokens == 0 || p.product.n == 0) return SG_OK;
  with_type(input(call, 0), [&]<class X>(X) {
    if (p.activation != kNone) {
      launch<true, X>(call, p);
    } else {
      launch<false, X>(call, p);
    }
  });
  return launched(call);
}

constexpr sg_kernel kernel = row_invariant(describe_kernel("rms_norm_linear", "few", -1, supports, nullptr, run));
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda

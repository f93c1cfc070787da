// Products of a few tokens with a bf16 weight, at their core: a warp's rows of the weight, straight from memory into the
// fragments of mma.m16n8k16, times the terms that some source gives for each token.
#pragma once

#include "attention_ptx.cuh"
#include "linear_few.cuh"
#include "linear_few_ptx.cuh"

namespace sg::cuda {

constexpr int kGroup = 128;  // terms that a warp takes at once, in four chunks of 32
constexpr int64_t kBytesAhead = 4096;  // of a row

// Eight terms; zeros for those that are not there. `whole`: all of them are.
template <bool packed, bool whole, bool streamed>
__device__ inline uint4 load_terms(const bf16 *from, int left) {
  if constexpr (packed) {
    if (!whole && left <= 0) return {};
    if constexpr (streamed) return load_streamed(from);
    return *reinterpret_cast<const uint4 *>(from);
  } else {
    uint16_t terms[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) terms[i] = whole || i < left ? reinterpret_cast<const uint16_t *>(from)[i] : 0;
    uint4 word;
    memcpy(&word, terms, sizeof(word));
    return word;
  }
}

// This lane's tokens, one of each group of eight, as rows of x.
template <class X>
struct FewRows {
  const X *x;      // of the first
  int64_t step;    // elements from one to the next
  int left;        // tokens of the call from the first on; none where that is not there

  __device__ FewRows(const X *first, int64_t stride, int token, int tokens)
      : x(first + (token < tokens ? token * stride : 0)), step(kFewTokens * stride), left(tokens - token) {}
  __device__ bool has(int group) const { return group * kFewTokens < left; }
  __device__ const X *row(int group) const { return x + group * step; }
};

// Terms as x stores them; of a token that is not there, zeros.
struct StoredTerms {
  FewRows<bf16> rows;

  template <bool packed, bool whole>
  __device__ void begin(int, int) {}
  template <bool packed, bool whole>
  __device__ uint4 eight(int group, int at, int left) {
    return rows.has(group) ? load_terms<packed, whole, false>(rows.row(group) + at, left) : uint4{};
  }
};

// sums += the warp's 16 * tiles rows times the tokens over the terms [at, at + kGroup), of which this lane takes eight
// of each chunk; rows[i] and `source` have the first of these at `at`. The source is told where each chunk begins, and
// then gives its terms for every group of tokens.
template <int tiles, int groups, bool packed, bool whole, class Terms>
__device__ inline void add_group(const bf16 *const (&rows)[2 * tiles], Terms &source, int at, int left,
                                 float (&sums)[groups][tiles][4]) {
  // Chunks whose loads are under way at once.
  constexpr int kTogether = !packed || tiles > 1 ? 1 : groups > 1 ? 2 : 4;
#pragma unroll
  for (int first = 0; first < 4; first += kTogether) {
    uint4 weights[kTogether][2 * tiles];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int chunk = 32 * (first + j);
#pragma unroll
      for (int i = 0; i < 2 * tiles; ++i) {
        weights[j][i] = load_terms<packed, whole, true>(rows[i] + at + chunk, left - chunk);
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int chunk = 32 * (first + j);
      source.template begin<packed, whole>(at + chunk, left - chunk);
      uint4 terms[groups];
#pragma unroll
      for (int g = 0; g < groups; ++g) terms[g] = source.template eight<packed, whole>(g, at + chunk, left - chunk);
#pragma unroll
      for (int g = 0; g < groups; ++g) {
#pragma unroll
        for (int tile = 0; tile < tiles; ++tile) {
          const uint4 low = weights[j][2 * tile], high = weights[j][2 * tile + 1];
          multiply_fragments(sums[g][tile], {low.x, high.x, low.y, high.y}, terms[g].x, terms[g].y);
          multiply_fragments(sums[g][tile], {low.z, high.z, low.w, high.w}, terms[g].z, terms[g].w);
        }
      }
    }
  }
}

// A warp's sums go where the block adds them up.
template <int tiles, int groups>
__device__ inline void leave_sums(const float (&sums)[groups][tiles][4], FewSums<16 * tiles, groups> &left) {
  const int lane = lane_index();
  float *const mine = left.of_warp[threadIdx.x / 32];
#pragma unroll
  for (int g = 0; g < groups; ++g) {
#pragma unroll
    for (int i = 0; i < 4 * tiles; ++i) {
      const int row = 16 * (i / 4) + lane / 4 + i % 4 / 2 * 8, token = kFewTokens * g + 2 * (lane % 4) + i % 2;
      mine[row * FewSums<16 * tiles, groups>::kStride + token] = sums[g][i / 4][i % 4];
    }
  }
}

// Whether blocks take 32 rows of the weight: fewer than two of these a multiprocessor would leave memory idle where a
// block begins and ends.
inline bool wants_wide_blocks(int tokens, int64_t n) {
  return tokens > kFewTokens / 2 && n >= 64 * static_cast<int64_t>(device().units);
}

// body(groups, tiles, packed), constants: what a block takes, and whether operands move 16 bytes at a time.
template <class Body>
inline void with_few_blocks(int tokens, int64_t n, bool packed, Body &&body) {
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  using Most = std::integral_constant<int, kMostFewGroups>;
  const bool wide = wants_wide_blocks(tokens, n);
  if (!packed) return body(One{}, One{}, std::false_type{});
  if (tokens <= kFewTokens) return wide ? body(One{}, Two{}, std::true_type{}) : body(One{}, One{}, std::true_type{});
  return wide ? body(Most{}, Two{}, std::true_type{}) : body(Most{}, One{}, std::true_type{});
}

}  // namespace sg::cuda

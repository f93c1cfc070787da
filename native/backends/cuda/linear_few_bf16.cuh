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

// The terms of one token as x stores them; of a token that is not there, zeros.
struct StoredTerms {
  const bf16 *x;
  bool is_token;

  __device__ StoredTerms(const bf16 *first, int64_t stride, int token, int tokens)
      : x(first + (token < tokens ? token * stride : 0)), is_token(token < tokens) {}

  template <bool packed, bool whole>
  __device__ uint4 eight(int at, int left) {
    return is_token ? load_terms<packed, whole, false>(x + at, left) : uint4{};
  }
};

// sums += the warp's 16 * tiles rows times the tokens over the terms [at, at + kGroup), of which this lane takes eight
// of each chunk; rows[i] and `source` have the first of these at `at`.
template <int tiles, bool packed, bool whole, class Terms>
__device__ inline void add_group(const bf16 *const (&rows)[2 * tiles], Terms &source, int at, int left,
                                 float (&sums)[tiles][4]) {
  constexpr int kTogether = packed && tiles == 1 ? 4 : 1;  // chunks whose loads are under way at once
#pragma unroll
  for (int first = 0; first < 4; first += kTogether) {
    uint4 weights[kTogether][2 * tiles], terms[kTogether];
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
      terms[j] = source.template eight<packed, whole>(at + chunk, left - chunk);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        const uint4 low = weights[j][2 * tile], high = weights[j][2 * tile + 1];
        multiply_fragments(sums[tile], {low.x, high.x, low.y, high.y}, terms[j].x, terms[j].y);
        multiply_fragments(sums[tile], {low.z, high.z, low.w, high.w}, terms[j].z, terms[j].w);
      }
    }
  }
}

// A warp's sums go where the block adds them up.
template <int tiles>
__device__ inline void leave_sums(const float (&sums)[tiles][4], float (&partial)[16 * tiles * kFewStride]) {
  const int lane = lane_index();
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * tile + lane / 4 + 8 * (i / 2), token = 2 * (lane % 4) + i % 2;
      partial[row * kFewStride + token] = sums[tile][i];
    }
  }
}

}  // namespace sg::cuda

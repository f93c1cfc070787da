// Products of a few tokens with a bf16 weight, at their core: a warp's rows of the weight, straight from memory into the
// fragments of mma.m16n8k16, times the terms that some source gives for each token.
#pragma once

#include "attention_ptx.cuh"
#include "linear_few.cuh"
#include "linear_few_ptx.cuh"

namespace sg::cuda {

constexpr int kFewRows = 16;  // of the weight, of a block and of each of its warps
constexpr int kGroup = 128;   // terms that a warp takes at once, in kChunks chunks
constexpr int kChunk = 32, kChunks = kGroup / kChunk;
constexpr int64_t kBytesAhead = 4096;  // of a row

// Eight terms, of which `left` are there; zeros for the others.
template <bool packed, bool streamed>
__device__ inline uint4 load_terms(const bf16 *from, int left) {
  if constexpr (packed) {
    if (left <= 0) return {};
    if constexpr (streamed) return load_streamed(from);
    return *reinterpret_cast<const uint4 *>(from);
  } else {
    uint16_t terms[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) terms[i] = i < left ? reinterpret_cast<const uint16_t *>(from)[i] : 0;
    uint4 word;
    memcpy(&word, terms, sizeof(word));
    return word;
  }
}

// A group of this lane's two rows of the weight: eight terms of each chunk. 4 KB a warp.
struct FewWeights {
  uint4 of_chunk[kChunks][2];

  template <bool packed>
  __device__ __forceinline__ void load(const bf16 *const (&rows)[2], int at, int k) {
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        of_chunk[j][i] = load_terms<packed, true>(rows[i] + at + j * kChunk, k - at - j * kChunk);
      }
    }
  }
};

// How many blocks of a multiprocessor there is room for. Two: the next group of terms is on its way while one is
// multiplied. Three: it is not, and a group's registers are free for another block.
constexpr int kFewBlocks = 2, kMostFewBlocks = 3;

// Three where they make one wave of what would be more than one of two.
inline int few_blocks_of_unit(int64_t blocks) {
  const int64_t units = device().units;
  return blocks > kFewBlocks * units && blocks <= kMostFewBlocks * units ? kMostFewBlocks : kFewBlocks;
}

// sums = this warp's part of kFewRows rows times the tokens: warps take groups of terms in turn. terms(at) gives the
// eight of this lane's token from `at` on, zeros from k on.
template <bool packed, int blocks, class Terms>
__device__ __forceinline__ void multiply_few(const bf16 *const (&rows)[2], int k, Terms &&terms, float (&sums)[4]) {
  constexpr int kStep = kFewWarps * kGroup;
  constexpr bool kAhead = blocks == kFewBlocks;
  int at = static_cast<int>(threadIdx.x) / 32 * kGroup + 8 * (lane_index() % 4);
  FewWeights now, next;
  if constexpr (kAhead) now.load<packed>(rows, at, k);
#pragma unroll 2
  for (; at / kGroup * kGroup < k; at += kStep) {
    if constexpr (kAhead) {
      next.load<packed>(rows, at + kStep, k);
    } else {
      now.load<packed>(rows, at, k);
    }
    uint4 column[kChunks];
#pragma unroll
    for (int j = 0; j < kChunks; ++j) column[j] = terms(at + j * kChunk);
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      const uint4 low = now.of_chunk[j][0], high = now.of_chunk[j][1];
      multiply_fragments(sums, {low.x, high.x, low.y, high.y}, column[j].x, column[j].y);
      multiply_fragments(sums, {low.z, high.z, low.w, high.w}, column[j].z, column[j].w);
    }
    if constexpr (kAhead) now = next;
  }
}

// A warp's sums go where the block adds them up.
__device__ inline void leave_sums(const float (&sums)[4], float (&partial)[kFewRows * kFewStride]) {
  const int lane = lane_index();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    partial[(lane / 4 + 8 * (i / 2)) * kFewStride + 2 * (lane % 4) + i % 2] = sums[i];
  }
}

}  // namespace sg::cuda

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). surogate_core/ops/dropout.py has the
// same in numpy.
#pragma once

#include "kernel.cuh"

namespace sg::cuda {

// The four words of a counter, which is itself four words.
__device__ inline void philox(const uint32_t (&counter)[4], uint32_t key0, uint32_t key1, uint32_t (&words)[4]) {
  uint32_t w0 = counter[0], w1 = counter[1], w2 = counter[2], w3 = counter[3];
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = static_cast<uint64_t>(w0) * 0xD2511F53u, second = static_cast<uint64_t>(w2) * 0xCD9E8D57u;
    w0 = static_cast<uint32_t>(second >> 32) ^ w1 ^ key0;
    w1 = static_cast<uint32_t>(second);
    w2 = static_cast<uint32_t>(first >> 32) ^ w3 ^ key1;
    w3 = static_cast<uint32_t>(first);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  words[0] = w0, words[1] = w1, words[2] = w2, words[3] = w3;
}

}  // namespace sg::cuda

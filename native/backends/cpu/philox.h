// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), as many counters at a time as a
// vector has 64-bit lanes. surogate_core/ops/dropout.py has the same in numpy.
#pragma once

#include "rows.h"

namespace sg::cpu::SG_ISA {

// A counter word sits in the low half of a 64-bit lane; what is above it is ignored by the multiplication that reads
// it. So a round costs six instructions for as many counters as there are lanes.
#if defined(__AVX512F__)
using vu = __m512i;
inline vu vu_set(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
inline vu vu_count() { return _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7); }
inline vu vu_add(vu a, vu b) { return _mm512_add_epi64(a, b); }
inline vu vu_multiply(vu a, vu b) { return _mm512_mul_epu32(a, b); }
inline vu vu_high(vu a) { return _mm512_srli_epi64(a, 32); }
inline vu vu_xor3(vu a, vu b, vu c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
inline vu vu_join(vu low, vu high) { return _mm512_mask_blend_epi32(0xAAAA, low, _mm512_slli_epi64(high, 32)); }
inline vu vu_interleave_first(vu a, vu b) {
  return _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), b);
}
inline vu vu_interleave_second(vu a, vu b) {
  return _mm512_permutex2var_epi64(a, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15), b);
}
#else
using vu = __m256i;
inline vu vu_set(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
inline vu vu_count() { return _mm256_setr_epi64x(0, 1, 2, 3); }
inline vu vu_add(vu a, vu b) { return _mm256_add_epi64(a, b); }
inline vu vu_multiply(vu a, vu b) { return _mm256_mul_epu32(a, b); }
inline vu vu_high(vu a) { return _mm256_srli_epi64(a, 32); }
inline vu vu_xor3(vu a, vu b, vu c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
inline vu vu_join(vu low, vu high) { return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xAA); }
inline vu vu_interleave_first(vu a, vu b) {
  return _mm256_permute2x128_si256(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b), 0x20);
}
inline vu vu_interleave_second(vu a, vu b) {
  return _mm256_permute2x128_si256(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b), 0x31);
}
#endif

// The four words of one counter.
inline void philox_words(const uint32_t (&counter)[4], uint32_t key0, uint32_t key1, uint32_t (&words)[4]) {
  uint32_t w0 = counter[0], w1 = counter[1], w2 = counter[2], w3 = counter[3];
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

constexpr int kPhiloxBatch = 2 * kLanes;  // words of as many counters as a vector has 64-bit lanes

struct Philox {
  uint64_t keys[10][2];
  uint32_t third, fourth;  // words of the counter; the first two count

  Philox(uint32_t key0, uint32_t key1, uint32_t third_word, uint32_t fourth_word)
      : third(third_word), fourth(fourth_word) {
    for (auto &key : keys) {
      key[0] = key0;
      key[1] = key1;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
  }

  // Words 4 * first_counter and on: two vectors of kLanes.
  SG_FLATTEN void batch(uint64_t first_counter, vu *words) const {
    vu w0 = vu_add(vu_set(first_counter), vu_count()), w1 = vu_high(w0), w2 = vu_set(third), w3 = vu_set(fourth);
    const vu m0 = vu_set(0xD2511F53u), m1 = vu_set(0xCD9E8D57u);
    for (const auto &key : keys) {
      const vu first = vu_multiply(w0, m0), second = vu_multiply(w2, m1);
      w0 = vu_xor3(vu_high(second), w1, vu_set(key[0]));
      w1 = second;
      w2 = vu_xor3(vu_high(first), w3, vu_set(key[1]));
      w3 = first;
    }
    const vu w01 = vu_join(w0, w1), w23 = vu_join(w2, w3);
    words[0] = vu_interleave_first(w01, w23);
    words[1] = vu_interleave_second(w01, w23);
  }
};

}  // namespace sg::cpu::SG_ISA

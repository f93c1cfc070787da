// dropout(x, seed) -> y: zero where the element's random word is below p * 2^32, else x / (1 - p). The words are those of
// Philox4x32-10 (see surogate_core/ops/dropout.py): element e takes word e % 4 of counter (e / 4, stream_id), key seed.
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

// Counters run through the rounds side by side, one a lane.
#if defined(__AVX512F__)
using vu = __m512i;
inline vu vu_set(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline vu vu_count() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline vu vu_add(vu a, vu b) { return _mm512_add_epi32(a, b); }
inline vu vu_xor3(vu a, vu b, vu c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
struct Wide {
  vu high, low;
};
inline Wide vu_multiply(vu a, vu b) {  // 32 x 32 -> 64 bits, lane by lane
  const vu even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), b);
  return {_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd), _mm512_mullo_epi32(a, b)};
}
inline void vu_store4(uint32_t *out, vu a, vu b, vu c, vu d) {  // a0 b0 c0 d0 a1 b1 c1 d1 ...
  const vu ab_low = _mm512_unpacklo_epi32(a, b), ab_high = _mm512_unpackhi_epi32(a, b);
  const vu cd_low = _mm512_unpacklo_epi32(c, d), cd_high = _mm512_unpackhi_epi32(c, d);
  const vu counters[4] = {_mm512_unpacklo_epi64(ab_low, cd_low), _mm512_unpackhi_epi64(ab_low, cd_low),
                          _mm512_unpacklo_epi64(ab_high, cd_high), _mm512_unpackhi_epi64(ab_high, cd_high)};
  for (int j = 0; j < 4; ++j) {  // counters[j] holds those of lanes j, 4 + j, 8 + j and 12 + j
    _mm_store_si128(reinterpret_cast<__m128i *>(out + 4 * j), _mm512_extracti32x4_epi32(counters[j], 0));
    _mm_store_si128(reinterpret_cast<__m128i *>(out + 4 * (4 + j)), _mm512_extracti32x4_epi32(counters[j], 1));
    _mm_store_si128(reinterpret_cast<__m128i *>(out + 4 * (8 + j)), _mm512_extracti32x4_epi32(counters[j], 2));
    _mm_store_si128(reinterpret_cast<__m128i *>(out + 4 * (12 + j)), _mm512_extracti32x4_epi32(counters[j], 3));
  }
}
#else
using vu = __m256i;
inline vu vu_set(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline vu vu_count() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline vu vu_add(vu a, vu b) { return _mm256_add_epi32(a, b); }
inline vu vu_xor3(vu a, vu b, vu c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
struct Wide {
  vu high, low;
};
inline Wide vu_multiply(vu a, vu b) {  // 32 x 32 -> 64 bits, lane by lane
  const vu even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
  return {_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA),
          _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA)};
}
inline void vu_store4(uint32_t *out, vu a, vu b, vu c, vu d) {  // a0 b0 c0 d0 a1 b1 c1 d1 ...
  const vu ab_low = _mm256_unpacklo_epi32(a, b), ab_high = _mm256_unpackhi_epi32(a, b);
  const vu cd_low = _mm256_unpacklo_epi32(c, d), cd_high = _mm256_unpackhi_epi32(c, d);
  const vu counters[4] = {_mm256_unpacklo_epi64(ab_low, cd_low), _mm256_unpackhi_epi64(ab_low, cd_low),
                          _mm256_unpacklo_epi64(ab_high, cd_high), _mm256_unpackhi_epi64(ab_high, cd_high)};
  for (int j = 0; j < 4; ++j) {  // counters[j] holds those of lanes j and 4 + j
    _mm_store_si128(reinterpret_cast<__m128i *>(out + 4 * j), _mm256_castsi256_si128(counters[j]));
    _mm_store_si128(reinterpret_cast<__m128i *>(out + 4 * (4 + j)), _mm256_extracti128_si256(counters[j], 1));
  }
}
#endif

constexpr int kBatch = 4 * kLanes;  // words of one batch of counters

// `first_counter` is a multiple of kLanes, so no lane carries into the high word.
void philox_batch(uint64_t first_counter, uint32_t stream_id, uint32_t key0, uint32_t key1, uint32_t *words) {
  vu w0 = vu_add(vu_set(static_cast<uint32_t>(first_counter)), vu_count());
  vu w1 = vu_set(static_cast<uint32_t>(first_counter >> 32)), w2 = vu_set(stream_id), w3 = vu_set(0);
  const vu m0 = vu_set(0xD2511F53u), m1 = vu_set(0xCD9E8D57u);
  for (int round = 0; round < 10; ++round) {
    const Wide first = vu_multiply(w0, m0), second = vu_multiply(w2, m1);
    w0 = vu_xor3(second.high, w1, vu_set(key0));
    w1 = second.low;
    w2 = vu_xor3(first.high, w3, vu_set(key1));
    w3 = first.low;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  vu_store4(words, w0, w1, w2, w3);
}

// x where word >= threshold, else 0: unsigned comparison.
inline vf vkeep(vf x, const uint32_t *words, uint32_t threshold) {
#if defined(__AVX512F__)
  const __m512i random = _mm512_loadu_si512(words);
  return _mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask(random, _mm512_set1_epi32(static_cast<int>(threshold))), x);
#else
  const __m256i random = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(words));
  const __m256i larger = _mm256_max_epu32(random, _mm256_set1_epi32(static_cast<int>(threshold)));
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(larger, random)));
#endif
}

int32_t supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *seed = input(call, 1), *y = output(call, 0);
  if (!x || !seed || !y || !all_dense(call) || !is_activation(x) || x->dtype != y->dtype || !same_shape(x, y)) return 0;
  if (seed->dtype != SG_I32 || num_elements(seed) != 2) return 0;
  const double p = attr_float(call, "p", 0.0);
  return p >= 0.0 && p < 1.0 ? isa_score(SG_ISA_NAME) : 0;
}

int32_t run(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *y = output(call, 0);
  const uint32_t *seed = data<uint32_t>(input(call, 1));
  const double p = attr_float(call, "p", 0.0);
  const uint32_t threshold = static_cast<uint32_t>(p * 4294967296.0);
  const uint32_t stream_id = static_cast<uint32_t>(attr_int(call, "stream_id", 0));
  const vf scale = vset(static_cast<float>(1.0 / (1.0 - p)));
  const int64_t count = num_elements(x);
  constexpr int64_t chunk = 8192;  // a multiple of kBatch
  with_type(x, [&]<class T>(T) {
    parallel_for(call, (count + chunk - 1) / chunk, [&](int64_t task, int) {
      const int64_t end = (task + 1) * chunk < count ? (task + 1) * chunk : count;
      alignas(64) uint32_t words[kBatch];
      for (int64_t at = task * chunk; at < end; at += kBatch) {
        philox_batch(static_cast<uint64_t>(at) / 4, stream_id, seed[0], seed[1], words);
        const T *in = data<T>(x) + at;
        T *out = data<T>(y) + at;
        for_vectors(end - at < kBatch ? end - at : kBatch, [&](int64_t i, int m) SG_FLATTEN {
          vstore_upto(out + i, vkeep(vmul(vload_upto(in + i, m), scale), words + i, threshold), m);
        });
      }
    });
  });
  return SG_OK;
}

const sg_kernel kernel = {sizeof(sg_kernel), "dropout", "cpu", SG_ISA_NAME, SG_TRAIT_DETERMINISTIC | SG_TRAIT_IN_PLACE, 0,
                          supports, nullptr, nullptr, nullptr, run};
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA

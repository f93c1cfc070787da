// dropout(x, seed) -> y: zero where the element's random word is below p * 2^32, else x / (1 - p). The words are those
// of Philox4x32-10 (surogate_core/ops/dropout.py): element e takes word e % 4 of counter (e / 4, stream_id), key seed.
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

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
// x where random >= threshold, else 0.
inline vf vkeep(vf x, vu random, vu threshold) {
  return _mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask(random, threshold), x);
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
// x where random >= threshold, else 0.
inline vf vkeep(vf x, vu random, vu threshold) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(random, threshold), random)));
}
#endif

constexpr int kBatch = 2 * kLanes;  // words of as many counters as a vector has 64-bit lanes

struct Philox {
  uint64_t keys[10][2];
  uint32_t stream_id;

  Philox(const uint32_t *seed, uint32_t stream) : stream_id(stream) {
    uint32_t key0 = seed[0], key1 = seed[1];
    for (auto &key : keys) {
      key[0] = key0;
      key[1] = key1;
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
  }

  // Words 4 * first_counter and on: two vectors of kLanes.
  SG_FLATTEN void batch(uint64_t first_counter, vu *words) const {
    vu w0 = vu_add(vu_set(first_counter), vu_count()), w1 = vu_high(w0), w2 = vu_set(stream_id), w3 = vu_set(0);
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

int32_t supports(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *seed = input(call, 1), *y = output(call, 0);
  if (!x || !seed || !y || !all_dense(call) || !is_activation(x) || x->dtype != y->dtype || !same_shape(x, y)) return 0;
  if (seed->dtype != SG_I32 || num_elements(seed) != 2) return 0;
  const double p = attr_float(call, "p", 0.0);
  return p >= 0.0 && p < 1.0 ? isa_score(SG_ISA_NAME) : 0;
}

int32_t run(const sg_call *call) {
  const sg_tensor *x = input(call, 0), *y = output(call, 0);
  const double p = attr_float(call, "p", 0.0);
  const uint64_t limit = static_cast<uint64_t>(p * 4294967296.0);
  const vu threshold = vu_set(limit << 32 | limit);
  const vf scale = vset(static_cast<float>(1.0 / (1.0 - p)));
  const Philox generator(data<uint32_t>(input(call, 1)), static_cast<uint32_t>(attr_int(call, "stream_id", 0)));
  const int64_t count = num_elements(x);
  constexpr int64_t chunk = 8192;  // a multiple of kBatch
  with_type(x, [&]<class T>(T) {
    parallel_for(call, (count + chunk - 1) / chunk, [&](int64_t task, int) {
      const int64_t end = (task + 1) * chunk < count ? (task + 1) * chunk : count;
      for (int64_t at = task * chunk; at < end; at += kBatch) {
        vu words[2];
        generator.batch(static_cast<uint64_t>(at) / 4, words);
        const T *in = data<T>(x) + at;
        T *out = data<T>(y) + at;
        for_vectors(end - at < kBatch ? end - at : kBatch, [&](int64_t i, int m) SG_FLATTEN {
          vstore_upto(out + i, vkeep(vmul(vload_upto(in + i, m), scale), words[i / kLanes], threshold), m);
        });
      }
    });
  });
  return SG_OK;
}

constexpr sg_kernel kernel = describe_kernel("dropout", 0, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA

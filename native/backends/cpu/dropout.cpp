// dropout(x, seed) -> y: zero where the element's random word is below p * 2^32, else x / (1 - p). The words are those of
// Philox4x32-10 (see surogate_core/ops/dropout.py): element e takes word e % 4 of counter (e / 4, stream_id), key seed.
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

// One batch of counters runs through the rounds side by side, so that the compiler makes vectors of them.
constexpr int kCounters = 16, kBatch = 4 * kCounters;

void philox_batch(uint64_t first_counter, uint32_t stream_id, uint32_t key0, uint32_t key1, uint32_t *words) {
  alignas(64) uint32_t w0[kCounters], w1[kCounters], w2[kCounters], w3[kCounters];
  for (int i = 0; i < kCounters; ++i) {
    const uint64_t counter = first_counter + static_cast<uint64_t>(i);
    w0[i] = static_cast<uint32_t>(counter);
    w1[i] = static_cast<uint32_t>(counter >> 32);
    w2[i] = stream_id;
    w3[i] = 0;
  }
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kCounters; ++i) {
      const uint64_t first = static_cast<uint64_t>(w0[i]) * 0xD2511F53u, second = static_cast<uint64_t>(w2[i]) * 0xCD9E8D57u;
      w0[i] = static_cast<uint32_t>(second >> 32) ^ w1[i] ^ key0;
      w1[i] = static_cast<uint32_t>(second);
      w2[i] = static_cast<uint32_t>(first >> 32) ^ w3[i] ^ key1;
      w3[i] = static_cast<uint32_t>(first);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  for (int i = 0; i < kCounters; ++i) {
    words[4 * i] = w0[i];
    words[4 * i + 1] = w1[i];
    words[4 * i + 2] = w2[i];
    words[4 * i + 3] = w3[i];
  }
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

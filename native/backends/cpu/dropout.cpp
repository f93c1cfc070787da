// dropout(x, seed) -> y: zero where the element's random word is below p * 2^32, else x / (1 - p). The words are those
// of Philox4x32-10 (surogate_core/ops/dropout.py): element e takes word e % 4 of counter (e / 4, stream_id), key seed.
#include "philox.h"

namespace sg::cpu::SG_ISA {
namespace {

#if defined(__AVX512F__)
// x where random >= threshold, else 0.
inline vf vkeep(vf x, vu random, vu threshold) {
  return _mm512_maskz_mov_ps(_mm512_cmpge_epu32_mask(random, threshold), x);
}
#else
// x where random >= threshold, else 0.
inline vf vkeep(vf x, vu random, vu threshold) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(random, threshold), random)));
}
#endif

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
  const uint32_t *seed = data<uint32_t>(input(call, 1));
  const Philox generator(seed[0], seed[1], static_cast<uint32_t>(attr_int(call, "stream_id", 0)), 0);
  const int64_t count = num_elements(x);
  constexpr int64_t chunk = 8192;  // a multiple of kPhiloxBatch
  with_type(x, [&]<class T>(T) {
    parallel_for(call, (count + chunk - 1) / chunk, [&](int64_t task, int) {
      const int64_t end = (task + 1) * chunk < count ? (task + 1) * chunk : count;
      for (int64_t at = task * chunk; at < end; at += kPhiloxBatch) {
        vu words[2];
        generator.batch(static_cast<uint64_t>(at) / 4, words);
        const T *in = data<T>(x) + at;
        T *out = data<T>(y) + at;
        for_vectors(end - at < kPhiloxBatch ? end - at : kPhiloxBatch, [&](int64_t i, int m) SG_FLATTEN {
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

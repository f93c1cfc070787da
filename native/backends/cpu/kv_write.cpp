// kv_write(k[T, H, D], v[T, H, Dv], slots[T]) -> key_cache[S, H, D], value_cache[S, H, Dv]: row slots[t] of the caches
// becomes row t, rounded to the cache's dtype; a negative slot is skipped. Rows of k and v may lie apart.
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

bool fits(const sg_tensor *rows, const sg_tensor *cache) {
  if (!rows || !cache || rows->rank != 3 || cache->rank != 3) return false;
  if (!is_activation(rows) || !is_activation(cache)) return false;
  if (rows->shape[1] != cache->shape[1] || rows->shape[2] != cache->shape[2]) return false;
  return has_dense_rows(rows) && has_dense_rows(cache);
}

int32_t supports(const sg_call *call) {
  const sg_tensor *k = input(call, 0), *v = input(call, 1), *slots = input(call, 2);
  if (!fits(k, output(call, 0)) || !fits(v, output(call, 1)) || slots == nullptr) return 0;
  if (slots->dtype != SG_I32 || slots->rank != 1 || !is_dense(slots)) return 0;
  return slots->shape[0] == k->shape[0] && slots->shape[0] == v->shape[0] ? isa_score(SG_ISA_NAME) : 0;
}

void write_rows(const sg_tensor *rows, const sg_tensor *cache, const int32_t *slots, int64_t begin, int64_t end) {
  const int64_t n = rows->shape[1] * rows->shape[2];
  with_type(rows, [&]<class X>(X) {
    with_type(cache, [&]<class Y>(Y) {
      for (int64_t t = begin; t < end; ++t) {
        if (slots[t] < 0) continue;
        const X *in = data<X>(rows) + t * rows->strides[0];
        Y *out = data<Y>(cache) + slots[t] * cache->strides[0];
        for_vectors(n, [&](int64_t i, int m) SG_FLATTEN { vstore_upto(out + i, vload_upto(in + i, m), m); });
      }
    });
  });
}

int32_t run(const sg_call *call) {
  const sg_tensor *k = input(call, 0), *v = input(call, 1);
  const sg_tensor *key_cache = output(call, 0), *value_cache = output(call, 1);
  const int32_t *slots = data<int32_t>(input(call, 2));
  const int64_t tokens = k->shape[0];
  const int64_t size = key_cache->shape[0] < value_cache->shape[0] ? key_cache->shape[0] : value_cache->shape[0];
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] >= size) {
      return fail(call, "slot %d of token %lld is outside the cache of %lld rows", slots[t], static_cast<long long>(t),
                  static_cast<long long>(size));
    }
  }
  parallel_rows(call, tokens, k->shape[1] * (k->shape[2] + v->shape[2]), [&](int64_t begin, int64_t end) {
    write_rows(k, key_cache, slots, begin, end);
    write_rows(v, value_cache, slots, begin, end);
  });
  return SG_OK;
}

constexpr sg_kernel kernel = describe_row_kernel("kv_write", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA

// paged_attention in fp32 arithmetic, for caches and queries in fp32 or bf16; see attention_paged.h.
#include "attention_paged.h"

namespace sg::cpu::SG_ISA {
namespace {

bool is_index(const sg_tensor *t, int rank) {
  return t != nullptr && t->dtype == SG_I32 && t->rank == rank && is_dense(t);
}

int32_t supports(const sg_call *call) {
  const sg_tensor *q = input(call, 0), *k = input(call, 1), *v = input(call, 2), *o = output(call, 0);
  if (q == nullptr || k == nullptr || v == nullptr || o == nullptr) return 0;
  sg_tensor as_cache = *q;  // q may differ from the caches in dtype and rows alone
  as_cache.dtype = k->dtype;
  if (!is_activation(q) || !attention_supported(call, &as_cache, k, v)) return 0;
  if (!is_index(input(call, 3), 1) || !is_index(input(call, 4), 1) || !is_index(input(call, 5), 2)) return 0;
  if (input(call, 3)->shape[0] != q->shape[0] || input(call, 4)->shape[0] != q->shape[0]) return 0;
  if (attr_int(call, "block_size", 0) < 1 || o->dtype != q->dtype || !has_dense_heads(o)) return 0;
  if (o->shape[0] != q->shape[0] || o->shape[1] != q->shape[1] || o->shape[2] != v->shape[2]) return 0;
  return isa_score(SG_ISA_NAME);
}

template <class T>
int32_t run_with(const sg_call *call) {
  return input(call, 1)->dtype == SG_F32 ? Paged<T, float>(call).run() : Paged<T, bf16>(call).run();
}

int32_t run(const sg_call *call) {
  return input(call, 0)->dtype == SG_F32 ? run_with<float>(call) : run_with<bf16>(call);
}

const sg_kernel kernel = {
    sizeof(sg_kernel), "paged_attention", "cpu", SG_ISA_NAME, SG_TRAIT_DETERMINISTIC | SG_TRAIT_ROW_INVARIANT, 0,
    supports, paged_workspace, nullptr, nullptr, run};
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA

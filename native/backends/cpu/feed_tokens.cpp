// feed_tokens(tokens[T], sequence_ids[T], last_ids[B]) -> ids[T]: a negative token is what was sampled last for its
// sequence.
#include "rows.h"

namespace sg::cpu::SG_ISA {
namespace {

bool is_list(const sg_tensor *t) { return t->dtype == SG_I32 && t->rank == 1 && is_dense(t); }

int32_t supports(const sg_call *call) {
  const sg_tensor *tokens = input(call, 0), *sequences = input(call, 1), *last = input(call, 2), *ids = output(call, 0);
  if (!tokens || !sequences || !last || !ids) return 0;
  if (!is_list(tokens) || !is_list(sequences) || !is_list(last) || !is_list(ids)) return 0;
  return same_shape(tokens, sequences) && same_shape(tokens, ids) ? isa_score(SG_ISA_NAME) : 0;
}

int32_t run(const sg_call *call) {
  const int64_t count = num_elements(input(call, 0)), places = num_elements(input(call, 2));
  const int32_t *tokens = data<int32_t>(input(call, 0)), *sequences = data<int32_t>(input(call, 1));
  const int32_t *last = data<int32_t>(input(call, 2));
  int32_t *ids = data<int32_t>(output(call, 0));
  for (int64_t t = 0; t < count; ++t) {
    int32_t id = tokens[t];
    if (id < 0) id = sequences[t] >= 0 && sequences[t] < places ? last[sequences[t]] : 0;
    ids[t] = id < 0 ? 0 : id;
  }
  return SG_OK;
}

constexpr sg_kernel kernel = describe_row_kernel("feed_tokens", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cpu::SG_ISA

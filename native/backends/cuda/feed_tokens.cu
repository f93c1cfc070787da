// feed_tokens(tokens[T], sequence_ids[T], last_ids[B]) -> ids[T]: a negative token is what was sampled last for its
// sequence.
//
// Floor: a launch; one thread a token.
#include "vectors.cuh"

namespace sg::cuda {
namespace {

constexpr int kThreads = 128;

struct Lists {
  const int32_t *tokens, *sequences, *last;
  int32_t *ids;
  int64_t count, places;
};

__global__ void __launch_bounds__(kThreads) feed_tokens_kernel(Lists lists) {
  wait_for_kernels_ahead();
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= lists.count) return;
  int32_t id = lists.tokens[t];
  if (id < 0) {
    const int32_t sequence = lists.sequences[t];
    id = sequence >= 0 && sequence < lists.places ? lists.last[sequence] : 0;
  }
  lists.ids[t] = id < 0 ? 0 : id;
}

bool is_list(const sg_tensor *t) { return t->dtype == SG_I32 && t->rank == 1 && is_dense(t); }

int32_t supports(const sg_call *call) {
  const sg_tensor *tokens = input(call, 0), *sequences = input(call, 1), *last = input(call, 2), *ids = output(call, 0);
  if (!tokens || !sequences || !last || !ids) return 0;
  if (!is_list(tokens) || !is_list(sequences) || !is_list(last) || !is_list(ids)) return 0;
  return same_shape(tokens, sequences) && same_shape(tokens, ids) ? 10 : 0;
}

int32_t run(const sg_call *call) {
  const Lists lists{data<const int32_t>(input(call, 0)), data<const int32_t>(input(call, 1)),
                    data<const int32_t>(input(call, 2)), data<int32_t>(output(call, 0)), num_elements(input(call, 0)),
                    num_elements(input(call, 2))};
  if (lists.count == 0) return SG_OK;
  launch_ahead(call, static_cast<unsigned>(ceil_div(lists.count, kThreads)), kThreads, 0, feed_tokens_kernel, lists);
  return launched(call);
}

constexpr sg_kernel kernel = describe_kernel("feed_tokens", "cuda", -1, supports, nullptr, run);
SG_REGISTER_KERNEL(kernel);

}  // namespace
}  // namespace sg::cuda

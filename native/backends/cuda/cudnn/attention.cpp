// attention through cuDNN: o[T, H, Dv] and lse f32[T, H] from q[T, H, D], k[T, Hk, D], v[T, Hk, Dv] in bf16.
//
// Its floor is 4 T L H D / 2 FLOPs, causal, for documents of length L (an H200 reaches 570-650 TFLOP/s at D 128,
// 400-460 at D 64); cuDNN's kernel is what gets near it. Results are the same from run to run: nothing is added
// across blocks.
#include "attention_call.h"

namespace sg::cudnn {

using namespace sg::cuda;

namespace {

constexpr int32_t kScore = 30;

struct Call {
  explicit Call(const sg_call *call) : doc_starts(input(call, 3)) {
    operands[kQ] = input(call, 0);
    operands[kK] = input(call, 1);
    operands[kV] = input(call, 2);
    operands[kO] = output(call, 0);
    operands[kLse] = output(call, 1);
  }
  const sg_tensor *operands[kRoles] = {};
  const sg_tensor *doc_starts;
};

const Plan *plan_of(const sg_call *call) {
  const Call bound(call);
  Problem problem;
  return read_problem(call, bound.operands, bound.doc_starts, problem) ? find_plan(problem) : nullptr;
}

int32_t supports(const sg_call *call) { return plan_of(call) != nullptr ? kScore : 0; }

size_t workspace(const sg_call *call) { return total_workspace(plan_of(call), Call(call).operands); }

int32_t prepare(const sg_call *call, void **state) {
  *state = const_cast<Plan *>(plan_of(call));
  return SG_OK;
}

int32_t run(const sg_call *call) {
  const Call bound(call);
  return run_plan(call, static_cast<const Plan *>(call->state), bound.operands, bound.doc_starts);
}

}  // namespace

constexpr sg_kernel kAttention{sizeof(sg_kernel), "attention", "cuda", "cudnn",
                               SG_TRAIT_DETERMINISTIC | SG_TRAIT_CAPTURABLE, -1, supports, workspace, prepare,
                               keep_plan, run, nullptr};

}  // namespace sg::cudnn

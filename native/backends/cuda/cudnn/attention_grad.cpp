// attention_grad through cuDNN: dq, dk, dv from do, q, k, v, o, lse, in bf16.
//
// Its floor is 10 T L H D / 2 FLOPs, causal, for documents of length L (an H200 reaches 410-520 TFLOP/s at D 128).
// Two kernels: "cudnn_atomic" adds dq in whatever order blocks finish, and is for calls that allow that
// (deterministic = 0). "cudnn" adds in a fixed order. On Hopper it spills the gradient of the logits to do so, 2 M H
// L^2 bytes for M documents, empty ones included, of at most L tokens: attribute max_length pays there. Where that is
// much, the heads are taken in shares, one after another; where it is too much even so, our own deterministic kernel
// is chosen.
#include "attention_call.h"

namespace sg::cudnn {

using namespace sg::cuda;

namespace {

constexpr int32_t kScore = 30, kAtomicScore = 40;
constexpr size_t kGoodWorkspace = size_t{3} << 29;  // 1.5 GiB: no more shares than this takes
constexpr size_t kMaxWorkspace = size_t{2} << 30;
constexpr int64_t kMaxShares = 8;  // few heads at a time leave multiprocessors idle

struct Call {
  explicit Call(const sg_call *call) : doc_starts(input(call, 6)) {
    operands[kDo] = input(call, 0);
    operands[kQ] = input(call, 1);
    operands[kK] = input(call, 2);
    operands[kV] = input(call, 3);
    operands[kO] = input(call, 4);
    operands[kLse] = input(call, 5);
    operands[kDq] = output(call, 0);
    operands[kDk] = output(call, 1);
    operands[kDv] = output(call, 2);
  }
  const sg_tensor *operands[kRoles] = {};
  const sg_tensor *doc_starts;
};

// Whether heads can be split so that every share begins at a multiple of 16 bytes, the statistics' too.
bool can_share(const Problem &problem, int64_t shares) {
  return shares == 1 || (problem.kv_heads % shares == 0 && problem.heads / shares % 4 == 0);
}

// For the fewest shares of the heads whose workspace is good, or else for the most. cuDNN refuses more than it can count:
// 32 heads of 8192 tokens have 2^31 logits.
const Plan *find_shared_plan(const Problem &problem, const Call &bound) {
  const Plan *plan = nullptr;
  for (int64_t shares = 1; shares <= kMaxShares; shares *= 2) {
    if (!can_share(problem, shares)) break;
    Problem share = problem;
    share.heads /= shares;
    share.kv_heads /= shares;
    const Plan *next = find_plan(share);
    if (next == nullptr) continue;
    plan = next;
    if (total_workspace(plan, bound.operands) <= kGoodWorkspace) break;
  }
  return plan;
}

bool fits(const Plan *plan, const Call &bound) {
  return plan != nullptr && total_workspace(plan, bound.operands) <= kMaxWorkspace;
}

// Long documents cuDNN takes only with gradients that lie dense; they are then made in the workspace and copied.
const Plan *find_deterministic_plan(Problem problem, const Call &bound) {
  const Plan *plan = find_shared_plan(problem, bound);
  if (fits(plan, bound)) return plan;
  for (Role role : {kDq, kDk, kDv}) problem.strides[role] = problem.heads_of(role) * problem.dim_of(role);
  return find_shared_plan(problem, bound);
}

const Plan *plan_of(const sg_call *call, bool deterministic) {
  if ((attr_int(call, "deterministic", 1) != 0) != deterministic) return nullptr;
  const Call bound(call);
  Problem problem;
  problem.backward = true;
  problem.deterministic = deterministic;
  if (!read_problem(call, bound.operands, bound.doc_starts, problem)) return nullptr;
  return deterministic ? find_deterministic_plan(problem, bound) : find_plan(problem);
}

template <bool kDeterministic>
int32_t supports(const sg_call *call) {
  const Plan *plan = plan_of(call, kDeterministic);
  if (plan == nullptr) return 0;
  if (!kDeterministic) return kAtomicScore;
  return fits(plan, Call(call)) ? kScore : 0;
}

template <bool kDeterministic>
size_t workspace(const sg_call *call) {
  return total_workspace(plan_of(call, kDeterministic), Call(call).operands);
}

template <bool kDeterministic>
int32_t prepare(const sg_call *call, void **state) {
  *state = const_cast<Plan *>(plan_of(call, kDeterministic));
  return SG_OK;
}

int32_t run(const sg_call *call) {
  const Call bound(call);
  return run_plan(call, static_cast<const Plan *>(call->state), bound.operands, bound.doc_starts);
}

}  // namespace

constexpr sg_kernel kAttentionGrad{sizeof(sg_kernel), "attention_grad", "cuda", "cudnn",
                                   SG_TRAIT_DETERMINISTIC | SG_TRAIT_CAPTURABLE, -1, supports<true>, workspace<true>,
                                   prepare<true>, keep_plan, run, nullptr};

constexpr sg_kernel kAttentionGradAtomic{sizeof(sg_kernel), "attention_grad", "cuda", "cudnn_atomic",
                                         SG_TRAIT_CAPTURABLE, -1, supports<false>, workspace<false>, prepare<false>,
                                         keep_plan, run, nullptr};

}  // namespace sg::cudnn

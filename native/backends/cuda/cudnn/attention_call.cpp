#include "attention_call.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ragged.h"

namespace sg::cudnn {

using namespace sg::cuda;

namespace {

// cuDNN's tiles of tokens are 64 or 128; a longest document in steps of that makes for fewer plans and no odd cases.
constexpr int64_t kLengthMultiple = 128;
constexpr int64_t kAlignment = 256;      // of parts of the workspace
constexpr int64_t kTensorAlignment = 16;  // what the plans assume of every tensor
constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxUnequalHeadDim = 128;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

bool is_operand(const sg_tensor *t, int32_t dtype, int64_t tokens, int64_t heads, int64_t dim) {
  if (t == nullptr || t->dtype != dtype || !has_dense_rows(t)) return false;
  if (t->shape[0] != tokens || t->shape[1] != heads) return false;
  return dim == 1 ? t->rank == 2 : t->rank == 3 && t->shape[2] == dim;
}

// 16-byte rows, and offsets that fit 32 bits.
bool is_addressable(Role role, int64_t tokens, int64_t stride) {
  if (role != kLse && stride * 2 % kTensorAlignment != 0) return false;
  return stride > 0 && tokens <= std::numeric_limits<int32_t>::max() / stride;
}

bool read_operands(const sg_tensor *const (&operands)[kRoles], Problem &problem) {
  const sg_tensor *q = operands[kQ], *k = operands[kK], *v = operands[kV];
  if (q == nullptr || k == nullptr || v == nullptr || q->rank != 3 || k->rank != 3 || v->rank != 3) return false;
  problem.tokens = q->shape[0];
  problem.heads = q->shape[1];
  problem.kv_heads = k->shape[1];
  problem.head_dim = q->shape[2];
  problem.value_dim = v->shape[2];
  if (problem.tokens < 1 || problem.kv_heads < 1 || problem.heads % problem.kv_heads != 0) return false;
  for (int i = 0; i < problem.num_roles(); ++i) {
    const Role role = static_cast<Role>(i);
    const int32_t dtype = role == kLse ? SG_F32 : SG_BF16;
    const sg_tensor *t = operands[role];
    if (!is_operand(t, dtype, problem.tokens, problem.heads_of(role), problem.dim_of(role))) return false;
    if (!is_addressable(role, problem.tokens, t->strides[0])) return false;
    problem.strides[role] = t->strides[0];
  }
  return true;
}

bool are_head_dims_supported(const Problem &problem) {
  // Backward, cuDNN needs a multiple of 16 to size its buffers by tokens instead of by documents times the longest.
  const int64_t multiple = problem.backward ? 16 : 8, dim = problem.head_dim, value_dim = problem.value_dim;
  if (dim % multiple != 0 || value_dim % multiple != 0) return false;
  return std::max(dim, value_dim) <= (dim == value_dim ? kMaxHeadDim : kMaxUnequalHeadDim);
}

// Where the parts of a call's workspace are: lengths, the offsets of each tensor, then the plan's own.
struct Layout {
  explicit Layout(const Plan *plan) {
    const Problem &problem = problem_of(plan);
    lengths_bytes = round_up(problem.documents * 4, kAlignment);
    offsets_bytes = round_up((problem.documents + 1) * 4, kAlignment);
    plan_at = lengths_bytes + problem.num_roles() * offsets_bytes;
  }
  int64_t lengths_bytes, offsets_bytes, plan_at;
};

int64_t element_bytes(Role role) { return role == kLse ? 4 : 2; }

// `shares`: how many times the plan's heads the tensors have.
Ragged describe_ragged(const Problem &problem, int64_t shares, const Operands &operands, const sg_tensor *doc_starts) {
  Ragged ragged{};
  ragged.doc_starts = data<const int32_t>(doc_starts);
  ragged.documents = static_cast<int32_t>(problem.documents);
  ragged.tokens = static_cast<int32_t>(problem.tokens);
  ragged.longest = static_cast<int32_t>(problem.longest);
  ragged.num_tensors = problem.num_roles();
  ragged.lengths = operands.lengths;
  for (int i = 0; i < problem.num_roles(); ++i) {
    ragged.strides[i] = static_cast<int32_t>(problem.strides[i]);
    ragged.offsets[i] = operands.offsets[i];
  }
  const auto add_output = [&](Role role) {
    const int64_t words = element_bytes(role) / 2;
    ragged.outputs[ragged.num_outputs++] = {static_cast<uint16_t *>(operands.tensors[role]),
                                            shares * problem.heads_of(role) * problem.dim_of(role) * words,
                                            problem.strides[role] * words};
  };
  if (problem.backward) {
    for (const Role role : {kDq, kDk, kDv}) add_output(role);
  } else {
    for (const Role role : {kO, kLse}) add_output(role);
  }
  return ragged;
}

}  // namespace

bool read_problem(const sg_call *call, const sg_tensor *const (&operands)[kRoles], const sg_tensor *doc_starts,
                  Problem &problem) {
  if (doc_starts == nullptr || doc_starts->dtype != SG_I32 || doc_starts->rank != 1) return false;
  if (!is_dense(doc_starts) || doc_starts->shape[0] < 2) return false;
  if (!read_operands(operands, problem) || !are_head_dims_supported(problem)) return false;
  problem.documents = doc_starts->shape[0] - 1;
  problem.scale = static_cast<float>(attr_float(call, "scale", 0.0));
  if (!(problem.scale > 0.0f) || !std::isfinite(problem.scale) || attr_float(call, "softcap", 0.0) > 0) return false;
  const int64_t limit = attr_int(call, "max_length", 0);
  const int64_t longest = limit > 0 ? std::min(limit, problem.tokens) : problem.tokens;
  problem.longest = round_up(longest, kLengthMultiple);
  problem.causal = attr_int(call, "causal", 1) != 0;
  const int64_t window = attr_int(call, "window", 0);
  problem.window = window < problem.longest ? window : 0;  // a window that wide hides nothing
  return problem.causal || problem.window == 0;
}

// Where a tensor of the plan is made when its tokens lie elsewhere than in the call: behind the plan's own workspace.
int64_t copied_bytes(const Problem &problem, Role role, const sg_tensor *operand) {
  if (problem.strides[role] == operand->strides[0]) return 0;
  return round_up(problem.tokens * problem.strides[role] * element_bytes(role), kAlignment);
}

size_t total_workspace(const Plan *plan, const sg_tensor *const (&operands)[kRoles]) {
  int64_t bytes = Layout(plan).plan_at + round_up(static_cast<int64_t>(workspace_bytes(plan)), kAlignment);
  for (int i = 0; i < problem_of(plan).num_roles(); ++i) {
    bytes += copied_bytes(problem_of(plan), static_cast<Role>(i), operands[i]);
  }
  return static_cast<size_t>(bytes);
}

int32_t run_plan(const sg_call *call, const Plan *plan, const sg_tensor *const (&operands)[kRoles],
                 const sg_tensor *doc_starts) {
  const Problem &problem = problem_of(plan);
  const Layout layout(plan);
  char *workspace = static_cast<char *>(call->workspace);
  Operands pointers;
  const char *copies[kRoles] = {};
  pointers.lengths = reinterpret_cast<int32_t *>(workspace);
  pointers.workspace = workspace + layout.plan_at;
  char *copy = workspace + layout.plan_at + round_up(static_cast<int64_t>(workspace_bytes(plan)), kAlignment);
  for (int i = 0; i < problem.num_roles(); ++i) {
    if (reinterpret_cast<uintptr_t>(operands[i]->data) % kTensorAlignment != 0) {
      return fail(call, "%s through cuDNN: a tensor begins at an address that is no multiple of 16; align it, or "
                  "choose another kernel", call->op);
    }
    const int64_t copied = copied_bytes(problem, static_cast<Role>(i), operands[i]);
    pointers.tensors[i] = copied > 0 ? copy : operands[i]->data;
    copies[i] = copied > 0 ? copy : nullptr;
    copy += copied;
    pointers.offsets[i] = reinterpret_cast<int32_t *>(workspace + layout.lengths_bytes + i * layout.offsets_bytes);
  }
  const cudaStream_t queue = stream(call);
  const int64_t shares = operands[kQ]->shape[1] / problem.heads;
  launch_ragged(describe_ragged(problem, shares, pointers, doc_starts), queue);
  if (launched(call) != SG_OK) return SG_ERROR;
  for (int64_t share = 0; share < shares; ++share) {
    char reason[512] = "";
    if (!execute(plan, queue, pointers, reason, sizeof(reason))) return fail(call, "%s", reason);
    for (int i = 0; i < problem.num_roles(); ++i) {
      const Role role = static_cast<Role>(i);
      const int64_t bytes = problem.heads_of(role) * problem.dim_of(role) * element_bytes(role);
      pointers.tensors[i] = static_cast<char *>(pointers.tensors[i]) + bytes;
    }
  }
  for (int i = 0; i < problem.num_roles(); ++i) {
    if (copies[i] == nullptr) continue;
    const Role role = static_cast<Role>(i);
    const auto size = static_cast<size_t>(element_bytes(role));
    const auto width = static_cast<size_t>(operands[i]->shape[1] * problem.dim_of(role)) * size;
    cudaMemcpy2DAsync(operands[i]->data, static_cast<size_t>(operands[i]->strides[0]) * size, copies[i],
                      static_cast<size_t>(problem.strides[role]) * size, width, static_cast<size_t>(problem.tokens),
                      cudaMemcpyDeviceToDevice, queue);
  }
  return launched(call);
}

}  // namespace sg::cudnn

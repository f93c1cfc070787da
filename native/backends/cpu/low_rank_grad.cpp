// low_rank_grad: of each branch dlow[T, R] = alpha dy b and db[N, R] += alpha dy^T low, as the two products that it
// stands for. What makes it one op, that dy is read once and by one call, pays on devices; a core spends its time in
// the products.
#include "linear.h"

namespace sg::cpu::SG_ISA {
namespace {

constexpr int kMostBranches = 4;

// The columns [first, first + count) of a matrix of activations.
sg_tensor columns_of(const sg_tensor *t, int64_t first, int64_t count) {
  sg_tensor part = *t;
  part.data = static_cast<char *>(t->data) + row_bytes(t->dtype, first);
  part.shape[1] = count;
  return part;
}

// One branch's operands: columns of dy, low and dlow, and the matrices that are its own.
struct Branch {
  sg_tensor dy, low, dlow;
  const sg_tensor *b, *db;
};

struct Branches {
  Branch at[kMostBranches];
  int count;
};

// A call of linear_input_grad (dy, b) or linear_weight_grad (dy, low) on the operands of a branch.
template <LinearOp op>
struct Product {
  static_assert(op != LinearOp::forward);
  const sg_tensor *inputs[3], *outputs[1];
  sg_call call;

  Product(const sg_call *whole, const Branch &branch)
      : inputs{&branch.dy, op == LinearOp::input_grad ? branch.b : &branch.low, nullptr},
        outputs{op == LinearOp::input_grad ? &branch.dlow : branch.db},
        call(*whole) {
    call.num_inputs = op == LinearOp::input_grad ? 3 : 2;
    call.inputs = inputs;
    call.num_outputs = 1;
    call.outputs = outputs;
  }
  Product(const Product &) = delete;
};

bool is_matrix(const sg_tensor *t) { return t != nullptr && t->rank == 2; }

// False where operands are missing or do not lie side by side.
bool read_branches(const sg_call *call, Branches *branches) {
  const sg_tensor *dy = input(call, 0), *low = input(call, 1), *dlow = output(call, 0);
  if (!is_matrix(dy) || !is_matrix(low) || !is_matrix(dlow) || !is_matrix(input(call, 2))) return false;
  const int64_t rank = input(call, 2)->shape[1];
  int64_t features = 0, ranks = 0;
  for (branches->count = 0; branches->count < kMostBranches; ++branches->count) {
    const sg_tensor *b = input(call, 2 + branches->count), *db = output(call, 1 + branches->count);
    if (b == nullptr) break;
    if (!is_matrix(b) || db == nullptr || b->shape[1] != rank) return false;
    branches->at[branches->count] = {columns_of(dy, features, b->shape[0]), columns_of(low, ranks, rank),
                                     columns_of(dlow, ranks, rank), b, db};
    features += b->shape[0], ranks += rank;
  }
  return features == dy->shape[1] && ranks == low->shape[1] && ranks == dlow->shape[1];
}

int32_t supports(const sg_call *call) {
  Branches branches;
  if (call->num_inputs != 2 + kMostBranches || call->num_outputs != 1 + kMostBranches) return 0;
  if (!read_branches(call, &branches) || output(call, 0)->dtype != input(call, 0)->dtype) return 0;
  for (int i = 0; i < branches.count; ++i) {
    LinearProblem p;
    const Product<LinearOp::input_grad> to_low(call, branches.at[i]);
    const Product<LinearOp::weight_grad> to_b(call, branches.at[i]);
    if (!read_linear<LinearOp::input_grad>(&to_low.call, &p)) return 0;
    if (!read_linear<LinearOp::weight_grad>(&to_b.call, &p)) return 0;
  }
  return isa_score(SG_ISA_NAME);
}

size_t workspace(const sg_call *call) {
  Branches branches;
  if (!read_branches(call, &branches)) return 0;
  size_t most = 0;
  for (int i = 0; i < branches.count; ++i) {
    const Product<LinearOp::input_grad> to_low(call, branches.at[i]);
    const Product<LinearOp::weight_grad> to_b(call, branches.at[i]);
    most = std::max(most, gemm_workspace<LinearOp::input_grad, FloatMicro>(&to_low.call));
    most = std::max(most, gemm_workspace<LinearOp::weight_grad, FloatMicro>(&to_b.call));
  }
  return most;
}

int32_t run(const sg_call *call) {
  Branches branches;
  if (!read_branches(call, &branches)) return fail(call, "%s: operands changed since the kernel was chosen", call->op);
  int32_t result = SG_OK;
  for (int i = 0; i < branches.count && result == SG_OK; ++i) {
    const Product<LinearOp::input_grad> to_low(call, branches.at[i]);
    const Product<LinearOp::weight_grad> to_b(call, branches.at[i]);
    result = gemm_run<LinearOp::input_grad, FloatMicro>(&to_low.call);
    if (result == SG_OK) result = gemm_run<LinearOp::weight_grad, FloatMicro>(&to_b.call);
  }
  return result;
}

constexpr sg_kernel low_rank_grad{sizeof(sg_kernel), "low_rank_grad", "cpu", SG_ISA_NAME, SG_TRAIT_DETERMINISTIC, -1,
                                  supports, workspace, nullptr, nullptr, run};
SG_REGISTER_KERNEL(low_rank_grad);

}  // namespace
}  // namespace sg::cpu::SG_ISA

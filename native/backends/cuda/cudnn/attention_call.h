// What the two ops' kernels share: reading a call into a problem, and running a plan.
#pragma once

#include "kernel.cuh"
#include "plan.h"

namespace sg::cudnn {

// The problem of a call, whose operands are by role (those past num_roles() unused); or false where this library has no
// kernel for it. `problem.backward` and `problem.deterministic` are set by the caller.
bool read_problem(const sg_call *call, const sg_tensor *const (&operands)[kRoles], const sg_tensor *doc_starts,
                  Problem &problem);

// Of the plan, of the offsets that go with it, and of the outputs whose tokens lie elsewhere in the plan than in the call.
size_t total_workspace(const Plan *plan, const sg_tensor *const (&operands)[kRoles]);

// Checks alignment, lays the offsets out in the call's workspace, executes. A plan for fewer heads than the call has
// runs once for each share of them. Outputs that the plan has in other strides than the call are copied to their places.
// The outputs of the op are NaN where doc_starts is invalid.
int32_t run_plan(const sg_call *call, const Plan *plan, const sg_tensor *const (&operands)[kRoles],
                 const sg_tensor *doc_starts);

// For a kernel's `release`: plans are kept for the life of the process.
inline void keep_plan(void *) {}

// The tables of attention.cpp and attention_grad.cpp.
extern const sg_kernel kAttention;
extern const sg_kernel kAttentionGrad;
extern const sg_kernel kAttentionGradAtomic;

}  // namespace sg::cudnn

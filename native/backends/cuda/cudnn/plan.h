// A plan: cuDNN's compiled graph for attention, forward or backward, over a packed batch of one shape.
//
// The only source that includes the cuDNN frontend is plan.cpp, which takes half a minute to compile; everything else
// of this library goes through this header.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace sg::cudnn {

// The tensors of both directions. Each is [tokens, heads, dim] with a stride between tokens.
enum Role : int { kQ, kK, kV, kO, kLse, kForwardRoles, kDo = kForwardRoles, kDq, kDk, kDv, kRoles };

// What a plan is built for: two calls with equal problems share one.
struct Problem {
  bool backward = false;
  bool deterministic = true;  // of the backward pass; the forward pass always is
  bool causal = true;
  int64_t window = 0;  // if > 0, token i sees tokens j with i - j < window only; for causal problems
  float scale = 1.0f;
  int64_t tokens = 0;     // T
  int64_t documents = 0;  // M, empty ones included
  int64_t longest = 0;    // no document has more tokens
  int64_t heads = 0, kv_heads = 0;
  int64_t head_dim = 0;   // of q and k
  int64_t value_dim = 0;  // of v and o
  int64_t strides[kRoles] = {};  // elements from token to token

  int num_roles() const { return backward ? static_cast<int>(kRoles) : static_cast<int>(kForwardRoles); }
  int64_t heads_of(Role role) const;
  int64_t dim_of(Role role) const;
};

// Device pointers of one execution.
struct Operands {
  void *tensors[kRoles] = {};
  int32_t *lengths = nullptr;           // [documents]
  int32_t *offsets[kRoles] = {};        // [documents + 1] each: elements from tensors[role] to where documents start
  void *workspace = nullptr;            // of workspace_bytes(plan)
};

struct Plan;

// Opens libcudnn.so.9 and NVRTC. False, with the reason, where one is not found or cuDNN is too old.
bool open_library(char *error, size_t error_size);

// "9.19.0", once opened.
const char *library_version();

// The plan for a problem on the active device, built on first demand (0.05 s, the first of a kind up to 1 s) and
// kept. nullptr where cuDNN cannot do it; with CUDNN_LOGLEVEL_DBG=2 CUDNN_LOGDEST_DBG=stderr in the environment,
// cuDNN says why.
const Plan *find_plan(const Problem &problem);

const Problem &problem_of(const Plan *plan);
size_t workspace_bytes(const Plan *plan);

// Puts the plan on the stream. False, with the reason, where cuDNN refuses.
bool execute(const Plan *plan, cudaStream_t stream, const Operands &operands, char *error, size_t error_size);

}  // namespace sg::cudnn

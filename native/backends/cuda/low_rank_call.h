// A call of low_rank_grad as its kernels read it: one branch, or up to four whose gradients lie side by side in dy.
#pragma once

#include <cstdint>

#include "kernel.cuh"

namespace sg::cuda::low_rank {

constexpr int kMostBranches = 4;

// One branch: dlow = alpha dy b, db += alpha dy^T low. dy, low and dlow are its columns of what the call has.
struct Branch {
  sg_tensor dy, b, low, dlow, db;
  int64_t tokens, features, rank;
};

struct Call {
  Branch branch[kMostBranches];
  int branches;
  int64_t tokens, rank;
};

// False where no kernel here can run it: dy, b, low and dlow are all bf16 or all f32, rows are dense.
bool read_call(const sg_call *call, Call *c);

// A branch whose operands begin anywhere, far from the device's peak.
void run_tiled(const sg_call *call, const Branch &branch);

inline float alpha_of(const sg_call *call) { return static_cast<float>(attr_float(call, "alpha", 1.0)); }

inline int64_t row_stride(const sg_tensor &t) { return t.shape[0] <= 1 ? t.shape[1] : t.strides[0]; }
inline bool is_aligned(const sg_tensor &t, uintptr_t bytes) {
  return reinterpret_cast<uintptr_t>(t.data) % bytes == 0;
}

}  // namespace sg::cuda::low_rank

// Matrix products in row-major terms, through cuBLASLt: what linear and its gradients run, and what other kernels of
// this library may run on parts of their own.
//
//   D[m, n] = alpha * op(A)[m, k] op(B)[k, n] + beta * C[m, n] + bias[n]        sums in fp32
//
// A kernel asks gemm_workspace_bytes in its `workspace`, makes a Gemm in its `prepare` (that is where algorithms are
// timed), keeps it as its state or in it, and calls run in its `run`, which is one launch and may be captured. The
// three layouts:
//
//   y[T, N]   = x[T, K] weight[N, K]^T     m T, n N, k K, transpose_b
//   dx[T, K]  = dy[T, N] weight[N, K]      m T, n K, k N
//   dw[N, K] += dy[T, N]^T x[T, K]         m N, n K, k T, transpose_a, add_c with c == d
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "surogate/abi.h"

namespace sg::cuda {

struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;                 // any of them may be 0
  bool transpose_a = false;                    // A is stored as [k, m] instead of [m, k]
  bool transpose_b = false;                    // B is stored as [n, k] instead of [k, n]
  int32_t ab_dtype = SG_BF16;                  // of A and of B: SG_BF16 or SG_F32. f32 is multiplied in true fp32
  int32_t d_dtype = SG_BF16;                   // of C, D and bias: SG_BF16 or SG_F32
  int64_t lda = 0, ldb = 0, ldc = 0, ldd = 0;  // elements from one stored row to the next; 0: rows are dense
  bool add_c = false;                          // beta is not 0; C may be D itself
  bool has_bias = false;                       // bias[n], dense
};

// How a product is computed.
enum class GemmKernel {
  library,  // cuBLASLt, or `narrow` where that is faster; where neither takes the problem, `tiled`
  narrow,   // of our own, for bf16 and one side of 16 to 64
  tiled     // of our own, for every problem, far from the device's peak
};

// Workspace that `run` of this problem's Gemm needs; 256-byte aligned.
size_t gemm_workspace_bytes(const GemmProblem &problem);

class Gemm {
 public:
  // Chooses an algorithm: the one that `tuning` (of an earlier tuning(); may be null) names if it was made by this
  // version of the library for this device and problem, else the fastest on random data. A problem is timed once in a
  // process. What is chosen depends on extents, dtypes, alignment and epilogue, but not on how far rows are apart nor
  // on C being D, so the same product in another place of memory gives the same bits. Returns null and sets *error
  // where cuBLASLt cannot be used.
  static std::unique_ptr<Gemm> plan(const GemmProblem &problem, const char *tuning, std::string *error,
                                    GemmKernel kernel = GemmKernel::library);
  virtual ~Gemm() = default;

  // Puts the product on the call's stream. c and bias are read only where the problem has them; D's other elements
  // (between rows) are left alone. beta 1 unless said otherwise. SG_OK, or SG_ERROR with the reason in the call's
  // error.
  virtual int32_t run(const sg_call *call, float alpha, const void *a, const void *b, const void *c, void *d,
                      const void *bias, void *workspace, float beta = 1.0f) const = 0;

  // The choice as text for sg_kernel.tuning; empty where there was nothing to choose.
  virtual std::string tuning() const = 0;
};

}  // namespace sg::cuda

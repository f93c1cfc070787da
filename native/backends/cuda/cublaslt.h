// cuBLASLt, opened at first use: its functions, a handle, and the descriptors of one product.
#pragma once

#include <cublasLt.h>

#include <string>

#include "gemm.h"

namespace sg::cuda {

struct CublasLt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtGetVersion) get_version;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulAlgoCheck) check;
  decltype(&cublasLtMatmulAlgoCapGetAttribute) capability;
  decltype(&cublasLtMatmulAlgoConfigSetAttribute) configure;
  cublasLtHandle_t handle;
  size_t version;  // of the library that was opened
};

// The library, with a handle on the active device; null, and why in *error (may be null), where it cannot be used.
const CublasLt *cublaslt(std::string *error);

// Bytes of one element of SG_F32, SG_BF16 or SG_F16.
constexpr int64_t element_bytes(int32_t dtype) { return dtype == SG_F32 ? 4 : 2; }

// What the library may use besides the operands. Products that are split along k keep fp32 parts here.
constexpr size_t kLibraryWorkspace = size_t{64} << 20;

// One product in the library's terms. The library counts columns first, so it is told D^T = op(B)^T op(A)^T: our B is
// its first operand, our A its second, and a transposed B is the transpose of what it sees.
class ProductDescriptors {
 public:
  ProductDescriptors(const CublasLt &library, const GemmProblem &problem);
  ~ProductDescriptors();
  ProductDescriptors(const ProductDescriptors &) = delete;
  ProductDescriptors &operator=(const ProductDescriptors &) = delete;

  // CUBLAS_STATUS_SUCCESS if all of them could be made.
  cublasStatus_t status() const { return status_; }

  // Tells the library, which looks at where the bias lies when it lists or checks algorithms, how aligned it will be.
  bool assume_bias(int64_t alignment) const;

  // Puts the product on a stream. All pointers are of the device; c is d where the problem adds no C.
  cublasStatus_t multiply(const cublasLtMatmulAlgo_t &algorithm, float alpha, const void *a, const void *b, float beta,
                          const void *c, void *d, const void *bias, void *workspace, cudaStream_t stream) const;

  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t first = nullptr, second = nullptr, c = nullptr, d = nullptr;

 private:
  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value &value);
  cublasStatus_t point_at_bias(const void *bias) const;
  void lay_out(cublasLtMatrixLayout_t *layout, int32_t dtype, int64_t rows, int64_t columns, int64_t stride);

  const CublasLt &library_;
  const bool has_bias_;
  cublasStatus_t status_ = CUBLAS_STATUS_SUCCESS;
};

}  // namespace sg::cuda

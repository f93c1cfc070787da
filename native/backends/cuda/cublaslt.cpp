#include "cublaslt.h"

#include <dlfcn.h>

namespace sg::cuda {
namespace {

constexpr const char *kLibraryFile = "libcublasLt.so.13";

// Python opens the wheel's file by its path beforehand; the name then finds that one, else the system's.
struct Opened {
  CublasLt library{};
  std::string error;

  Opened() {
    void *file = dlopen(kLibraryFile, RTLD_NOW | RTLD_LOCAL);
    if (file == nullptr) {
      const char *reason = dlerror();
      error = std::string("matrix products need cuBLASLt, which could not be opened (") +
              (reason == nullptr ? kLibraryFile : reason) + "): install it with pip install nvidia-cublas==13.1.0.3";
      return;
    }
    find(file, "cublasLtCreate", &library.create);
    find(file, "cublasLtGetVersion", &library.get_version);
    find(file, "cublasLtGetStatusString", &library.status_string);
    find(file, "cublasLtMatmul", &library.matmul);
    find(file, "cublasLtMatmulDescCreate", &library.desc_create);
    find(file, "cublasLtMatmulDescDestroy", &library.desc_destroy);
    find(file, "cublasLtMatmulDescSetAttribute", &library.desc_set);
    find(file, "cublasLtMatrixLayoutCreate", &library.layout_create);
    find(file, "cublasLtMatrixLayoutDestroy", &library.layout_destroy);
    find(file, "cublasLtMatmulPreferenceCreate", &library.preference_create);
    find(file, "cublasLtMatmulPreferenceDestroy", &library.preference_destroy);
    find(file, "cublasLtMatmulPreferenceSetAttribute", &library.preference_set);
    find(file, "cublasLtMatmulAlgoGetHeuristic", &library.heuristic);
    find(file, "cublasLtMatmulAlgoCheck", &library.check);
    find(file, "cublasLtMatmulAlgoCapGetAttribute", &library.capability);
    find(file, "cublasLtMatmulAlgoConfigSetAttribute", &library.configure);
    if (!error.empty()) return;
    library.version = library.get_version();
    const cublasStatus_t status = library.create(&library.handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
      error = std::string("cuBLASLt could not be started on this device: ") + library.status_string(status);
    }
  }

  template <class Function>
  void find(void *file, const char *name, Function *function) {
    *function = reinterpret_cast<Function>(dlsym(file, name));
    if (*function == nullptr && error.empty()) {
      error = std::string(kLibraryFile) + " has no " + name + ": install nvidia-cublas==13.1.0.3";
    }
  }
};

cudaDataType_t data_type(int32_t dtype) { return dtype == SG_F32 ? CUDA_R_32F : CUDA_R_16BF; }

}  // namespace

const CublasLt *cublaslt(std::string *error) {
  static const Opened opened;
  if (opened.error.empty()) return &opened.library;
  if (error != nullptr) *error = opened.error;
  return nullptr;
}

ProductDescriptors::ProductDescriptors(const CublasLt &library, const GemmProblem &problem)
    : library_(library), has_bias_(problem.has_bias) {
  const GemmProblem &p = problem;
  // fp32 operands are multiplied as such: this compute type does not allow TF32.
  status_ = library.desc_create(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
  set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (p.has_bias) {
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(data_type(p.d_dtype)));
  }
  lay_out(&first, p.ab_dtype, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.ldb);
  lay_out(&second, p.ab_dtype, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.lda);
  lay_out(&c, p.d_dtype, p.m, p.n, p.add_c ? p.ldc : p.ldd);
  lay_out(&d, p.d_dtype, p.m, p.n, p.ldd);
}

ProductDescriptors::~ProductDescriptors() {
  for (cublasLtMatrixLayout_t layout : {first, second, c, d}) {
    if (layout != nullptr) library_.layout_destroy(layout);
  }
  if (product != nullptr) library_.desc_destroy(product);
}

template <class Value>
void ProductDescriptors::set(cublasLtMatmulDescAttributes_t attribute, const Value &value) {
  if (status_ == CUBLAS_STATUS_SUCCESS) status_ = library_.desc_set(product, attribute, &value, sizeof(value));
}

// `rows` of ours, `stride` elements apart, are the columns of the library's matrix.
void ProductDescriptors::lay_out(cublasLtMatrixLayout_t *layout, int32_t dtype, int64_t rows, int64_t columns,
                                 int64_t stride) {
  if (status_ != CUBLAS_STATUS_SUCCESS) return;
  status_ = library_.layout_create(layout, data_type(dtype), static_cast<uint64_t>(columns),
                                   static_cast<uint64_t>(rows), stride);
}

cublasStatus_t ProductDescriptors::point_at_bias(const void *bias) const {
  if (!has_bias_) return CUBLAS_STATUS_SUCCESS;
  return library_.desc_set(product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias));
}

bool ProductDescriptors::assume_bias(int64_t alignment) const {
  return point_at_bias(reinterpret_cast<const void *>(alignment)) == CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t ProductDescriptors::multiply(const cublasLtMatmulAlgo_t &algorithm, float alpha, const void *a,
                                            const void *b, float beta, const void *c_data, void *d_data,
                                            const void *bias, void *workspace, cudaStream_t stream) const {
  if (const cublasStatus_t status = point_at_bias(bias); status != CUBLAS_STATUS_SUCCESS) return status;
  return library_.matmul(library_.handle, product, &alpha, b, first, a, second, &beta, c_data, c, d_data, d, &algorithm,
                         workspace, kLibraryWorkspace, stream);
}

}  // namespace sg::cuda

#include "gemm.h"

#include <optional>
#include <utility>

#include "cublaslt.h"
#include "gemm_kernels.h"
#include "gemm_narrow.h"
#include "gemm_tuning.h"
#include "kernel.cuh"

namespace sg::cuda {
namespace {

bool is_empty(const GemmProblem &p) { return p.m == 0 || p.n == 0; }

GemmProblem with_strides(GemmProblem p) {
  if (p.lda == 0) p.lda = p.transpose_a ? p.m : p.k;
  if (p.ldb == 0) p.ldb = p.transpose_b ? p.k : p.n;
  if (p.ldc == 0) p.ldc = p.n;
  if (p.ldd == 0) p.ldd = p.n;
  return p;
}

bool is_aligned(const void *data, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(alignment) == 0;
}

class TiledGemm final : public Gemm {
 public:
  explicit TiledGemm(const GemmProblem &problem) : problem_(problem) {}

  int32_t run(const sg_call *call, float alpha, const void *a, const void *b, const void *c, void *d, const void *bias,
              void *, float beta) const override {
    if (is_empty(problem_)) return SG_OK;
    tiled_gemm(problem_, alpha, a, b, beta, c, d, bias, stream(call));
    return launched(call);
  }

  std::string tuning() const override { return {}; }

 private:
  const GemmProblem problem_;
};

class NarrowGemm final : public Gemm {
 public:
  NarrowGemm(const GemmProblem &problem, std::string tuning) : problem_(problem), tuning_(std::move(tuning)) {}

  int32_t run(const sg_call *call, float alpha, const void *a, const void *b, const void *c, void *d, const void *,
              void *workspace, float beta) const override {
    if (!problem_.add_c) c = d;
    if (is_aligned(a, 16) && is_aligned(b, 16) && is_aligned(c, 16) && is_aligned(d, 16)) {
      narrow_gemm(problem_, alpha, a, b, beta, c, d, workspace, stream(call));
    } else {
      tiled_gemm(problem_, alpha, a, b, beta, c, d, nullptr, stream(call));
    }
    return launched(call);
  }

  std::string tuning() const override { return tuning_; }

 private:
  const GemmProblem problem_;
  const std::string tuning_;
};

class LibraryGemm final : public Gemm {
 public:
  LibraryGemm(const CublasLt &library, const GemmProblem &problem)
      : library_(library), problem_(problem), descriptors_(library, problem) {}

  cublasStatus_t status() const { return descriptors_.status(); }

  std::optional<Choice> choose(const char *tuning) {
    const std::optional<Choice> choice = cuda::choose(library_, problem_, descriptors_, tuning);
    if (choice.has_value() && choice->algorithm.has_value()) algorithm_ = *choice->algorithm;
    return choice;
  }

  int32_t run(const sg_call *call, float alpha, const void *a, const void *b, const void *c, void *d, const void *bias,
              void *workspace, float beta) const override {
    if (!problem_.add_c) c = d, beta = 0.0f;
    if (!problem_.has_bias) bias = nullptr;
    const cublasLtMatmulAlgo_t *algorithm = &algorithm_;
    if (!starts_aligned(a, b, c, d, bias)) {
      algorithm = algorithm_for_any_start();
      if (algorithm == nullptr) {
        tiled_gemm(problem_, alpha, a, b, beta, c, d, bias, stream(call));
        return launched(call);
      }
    }
    const cublasStatus_t result =
        descriptors_.multiply(*algorithm, alpha, a, b, beta, c, d, bias, workspace, stream(call));
    if (result == CUBLAS_STATUS_SUCCESS) return launched(call);
    return fail(call, "cuBLASLt: %s, in a product of %s", library_.status_string(result),
                problem_key(problem_).c_str());
  }

  std::string tuning() const override { return tuning_text(library_, problem_, {algorithm_}); }

 private:
  // Whether operands start as the algorithm was told: at multiples of what their rows are multiples of.
  bool starts_aligned(const void *a, const void *b, const void *c, const void *d, const void *bias) const {
    const GemmProblem &p = problem_;
    return is_aligned(a, row_alignment(p.ab_dtype, p.lda)) && is_aligned(b, row_alignment(p.ab_dtype, p.ldb)) &&
           is_aligned(c, row_alignment(p.d_dtype, p.add_c ? p.ldc : p.ldd)) &&
           is_aligned(d, row_alignment(p.d_dtype, p.ldd)) && is_aligned(bias, 16);
  }

  // Operands that start anywhere get the library's first choice for that; null where it has none.
  const cublasLtMatmulAlgo_t *algorithm_for_any_start() const {
    if (!looked_for_any_start_) {
      any_start_ = first_algorithm(library_, problem_, descriptors_, 1);
      looked_for_any_start_ = true;
    }
    return any_start_.has_value() ? &*any_start_ : nullptr;
  }

  const CublasLt &library_;
  const GemmProblem problem_;
  const ProductDescriptors descriptors_;
  cublasLtMatmulAlgo_t algorithm_{};
  mutable std::optional<cublasLtMatmulAlgo_t> any_start_;  // an instruction runs on one thread
  mutable bool looked_for_any_start_ = false;
};

// What the library never takes: nothing to multiply, and fp32 operands with a result in bf16.
bool is_for_library(const GemmProblem &p) {
  return !is_empty(p) && p.k > 0 && !(p.ab_dtype == SG_F32 && p.d_dtype == SG_BF16);
}

}  // namespace

size_t gemm_workspace_bytes(const GemmProblem &problem) { return is_for_library(problem) ? kLibraryWorkspace : 0; }

std::unique_ptr<Gemm> Gemm::plan(const GemmProblem &given, const char *tuning, std::string *error, GemmKernel kernel) {
  const GemmProblem problem = with_strides(given);
  if (kernel == GemmKernel::tiled) return std::make_unique<TiledGemm>(problem);
  if (kernel == GemmKernel::narrow) return std::make_unique<NarrowGemm>(problem, std::string());
  const CublasLt *library = cublaslt(error);
  if (library == nullptr) return nullptr;
  if (is_for_library(problem)) {
    auto gemm = std::make_unique<LibraryGemm>(*library, problem);
    if (gemm->status() != CUBLAS_STATUS_SUCCESS) {
      *error = "cuBLASLt cannot describe a product of " + problem_key(problem) + ": " +
               library->status_string(gemm->status());
      return nullptr;
    }
    if (const std::optional<Choice> choice = gemm->choose(tuning)) {
      if (choice->algorithm.has_value()) return gemm;
      return std::make_unique<NarrowGemm>(problem, tuning_text(*library, problem, *choice));
    }
  }
  return std::make_unique<TiledGemm>(problem);
}

}  // namespace sg::cuda

// Which of cuBLASLt's algorithms runs a product: taken from a text of an earlier choice, else measured, once in a
// process.
#pragma once

#include <optional>
#include <string>

#include "cublaslt.h"

namespace sg::cuda {

// Bytes that every row of an operand is a multiple of, up to 16. Starts of operands are assumed to be as aligned.
int64_t row_alignment(int32_t dtype, int64_t stride);

// What the choice of an algorithm may depend on, as text.
std::string problem_key(const GemmProblem &problem);

// The library's own first choice for operands that start at multiples of `alignment` bytes (1: anywhere that
// their elements may lie); nothing where it has none.
std::optional<cublasLtMatmulAlgo_t> first_algorithm(const CublasLt &library, const GemmProblem &problem,
                                                    const ProductDescriptors &descriptors, int64_t alignment);

// What runs a product: an algorithm of the library, or, without one, narrow_gemm.
struct Choice {
  std::optional<cublasLtMatmulAlgo_t> algorithm;
};

// The choice of `tuning` (may be null) if this library, device and problem made that text, else what was measured to be
// the fastest; nothing where nothing runs it.
std::optional<Choice> choose(const CublasLt &library, const GemmProblem &problem, const ProductDescriptors &descriptors,
                             const char *tuning);

std::string tuning_text(const CublasLt &library, const GemmProblem &problem, const Choice &choice);

}  // namespace sg::cuda

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

// The algorithm of `tuning` (may be null) if this library, device and problem made that text, else the one that was
// measured to be the fastest; nothing where the library has none.
std::optional<cublasLtMatmulAlgo_t> choose_algorithm(const CublasLt &library, const GemmProblem &problem,
                                                     const ProductDescriptors &descriptors, const char *tuning);

std::string tuning_text(const CublasLt &library, const GemmProblem &problem, const cublasLtMatmulAlgo_t &algorithm);

}  // namespace sg::cuda

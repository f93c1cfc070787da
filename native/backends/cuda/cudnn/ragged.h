// Where the documents of a packed batch begin, in the form that cuDNN takes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sg::cudnn {

constexpr int kMaxRaggedTensors = 9;
constexpr int kMaxRaggedOutputs = 3;

struct Ragged {
  // In.
  const int32_t *doc_starts;  // [documents + 1], device data
  int32_t documents;
  int32_t tokens;
  int32_t longest;  // tokens that a document may have
  int32_t num_tensors;
  int32_t strides[kMaxRaggedTensors];  // elements from token to token; tokens * stride < 2^31
  // Out.
  int32_t *lengths;                     // [documents]
  int32_t *offsets[kMaxRaggedTensors];  // [documents + 1]: doc_starts * stride
  // Tensors that become NaN where doc_starts is not what it must be: rows of 2-byte words.
  struct Output {
    uint16_t *data;
    int64_t words;   // of a row
    int64_t stride;  // words from row to row
  };
  int32_t num_outputs;
  Output outputs[kMaxRaggedOutputs];
};

// Puts one small kernel on the stream.
void launch_ragged(const Ragged &ragged, cudaStream_t stream);

}  // namespace sg::cudnn

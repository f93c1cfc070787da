// One run of a program: which tokens of which sequences, and which rows of logits.
#pragma once

#include <cstdint>
#include <vector>

#include "serve/request.h"

namespace surogate::serve {

// A sequence's share of a step.
struct Chunk {
  SequenceRef sequence;
  int32_t first = 0, count = 0;  // its tokens
  int32_t row = 0;               // its first row of logits
  int32_t prompt_rows = 0;       // rows for log-probabilities of the prompt, which come before the sampled one
  bool samples = false;          // the last token's logits give the next one
  uint32_t epoch = 0, residency = 0;  // the sequence's, when the step was planned

  int32_t rows() const { return prompt_rows + (samples ? 1 : 0); }
  int32_t sampled_row() const { return row + prompt_rows; }
};

struct Step {
  std::vector<Chunk> chunks;
  int32_t tokens = 0, rows = 0;
  bool adapters = false;
  bool full = false;      // some row has penalties, a bias or a mask
  bool logprobs = false;  // some row wants log-probabilities
  int32_t bucket = -1;

  void clear() {
    chunks.clear();
    tokens = rows = 0;
    adapters = full = logprobs = false;
    bucket = -1;
  }
};

// A size that a program exists for.
struct Bucket {
  int32_t tokens = 0, rows = 0;
  bool adapters = false;
  bool decode_only = false;  // takes one token of a sequence, and a row of each
};

// Which program runs how much.
class Buckets {
 public:
  void add(Bucket bucket) { buckets_.push_back(bucket); }
  size_t size() const { return buckets_.size(); }
  const Bucket &operator[](size_t index) const { return buckets_[index]; }

  // The smallest that takes so much, or -1. Where no row has an adapter those without are preferred.
  int32_t choose(int32_t tokens, int32_t rows, bool adapters, bool decodes) const;
  // The largest below `tokens` that takes prompt chunks and so many rows, or 0.
  int32_t below(int32_t tokens, int32_t rows, bool adapters) const;
  int32_t max_tokens(bool adapters) const;  // of one that takes prompt chunks
  int32_t max_rows(bool adapters) const;

 private:
  std::vector<Bucket> buckets_;
};

}  // namespace surogate::serve

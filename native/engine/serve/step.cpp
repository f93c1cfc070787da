#include "serve/step.h"

#include <algorithm>
#include <tuple>

namespace surogate::serve {

int32_t Buckets::choose(int32_t tokens, int32_t rows, bool adapters, bool decodes) const {
  int32_t best = -1;
  const auto cost = [&](const Bucket &b) { return std::tuple(b.adapters != adapters, b.tokens, b.rows, !b.decode_only); };
  for (size_t i = 0; i < buckets_.size(); ++i) {
    const Bucket &bucket = buckets_[i];
    if (bucket.tokens < tokens || bucket.rows < rows || (adapters && !bucket.adapters)) continue;
    if (bucket.decode_only && !decodes) continue;
    if (best < 0 || cost(bucket) < cost(buckets_[static_cast<size_t>(best)])) best = static_cast<int32_t>(i);
  }
  return best;
}

int32_t Buckets::below(int32_t tokens, int32_t rows, bool adapters) const {
  int32_t largest = 0;
  for (const Bucket &bucket : buckets_) {
    if (bucket.decode_only || bucket.tokens >= tokens || bucket.rows < rows || (adapters && !bucket.adapters)) continue;
    largest = std::max(largest, bucket.tokens);
  }
  return largest;
}

int32_t Buckets::max_tokens(bool adapters) const {
  int32_t largest = 0;
  for (const Bucket &bucket : buckets_) {
    if (!bucket.decode_only && (!adapters || bucket.adapters)) largest = std::max(largest, bucket.tokens);
  }
  return largest;
}

int32_t Buckets::max_rows(bool adapters) const {
  int32_t largest = 0;
  for (const Bucket &bucket : buckets_) {
    if (!bucket.decode_only && (!adapters || bucket.adapters)) largest = std::max(largest, bucket.rows);
  }
  return largest;
}

}  // namespace surogate::serve

// What becomes of a token once it is known: text, stops, limits, a budget of thinking.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "serve/deltas.h"
#include "serve/request.h"

namespace surogate::serve {

// What a grammar says of a token that its choice went on with.
enum class Verdict : uint8_t { kGoesOn, kComplete, kBroken };

// What may come next by the grammars of some choices, and what came. Called by the loop's thread, one call at a time.
class MaskSource {
 public:
  virtual ~MaskSource() = default;
  // Fills a row of `words` words for each handle: bit v % 32 of word v / 32 allows v. Sets failed[i] where there is none.
  virtual void fill(std::span<const int64_t> handles, uint32_t *rows, int32_t words, std::span<uint8_t> failed) = 0;
  // The choices of these handles went on with these tokens; a handle may be there several times.
  virtual void accept(std::span<const int64_t> handles, std::span<const int32_t> tokens, std::span<Verdict> verdicts) = 0;
};

// The texts of a model: what its tokens are, and which of them end an answer.
struct Texts {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::vector<int32_t> stop_tokens;  // sorted

  bool stops(int32_t token) const;
};

// What was computed about a token; nothing for one that was not sampled.
struct TokenRow {
  const float *logprob = nullptr;
  const int32_t *top_ids = nullptr;
  const float *top_logprobs = nullptr;
};

class SUROGATE_API Answers {
 public:
  Texts texts;
  Deltas deltas;  // what was gained since they were taken

  void begin(Group &group) const;  // gives a request's choices their texts

  // Appends a token to a choice, and says whether that ends it. forced: it was not the model's to choose, and ends nothing
  // but what is full.
  Finish take(Sequence &sequence, int32_t token, const TokenRow &row, Verdict verdict, bool forced = false);
  // What the choice must go on with now; empty: whatever the model likes.
  std::span<const int32_t> forced(const Sequence &sequence) const;
  // The choice ends without another token.
  void end(Sequence &sequence, Finish finish, const std::string &error = {});
  void tell_prompt(const Sequence &sequence);  // its log-probabilities are complete

  // Takes what would end the choice out of what is allowed, unless nothing else is.
  void forbid_stops(const Generation &request, std::span<uint32_t> mask);

 private:
  Deltas::Item &item(const Sequence &sequence);
  void add_text(Deltas::Item &to);
  void finish(Deltas::Item &to, Sequence &sequence, Finish finish);
  void follow_thinking(Sequence &sequence) const;

  Pieces pieces_;
  std::vector<int32_t> forbidden_;
};

}  // namespace surogate::serve

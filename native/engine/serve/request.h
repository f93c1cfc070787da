// What is asked of the loop, and what it keeps of it until the answer is complete.
//
// A request is a group of one or more choices. A choice is a sequence of tokens, of which some are computed (their keys and
// values are in the cache, or will be once the steps that were launched have run) and the rest is not. There is nothing
// else to its state: a prompt, an answer and a sequence that lost its blocks are all the same, tokens to be computed.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "serve/hash.h"
#include "serve/text.h"

namespace surogate::serve {

struct Sampling {
  float temperature = 1.0f, top_p = 1.0f, min_p = 0.0f;
  float presence = 0.0f, frequency = 0.0f, repetition = 1.0f;
  int32_t top_k = 0;  // 0: all
  uint64_t seed = 0;
  std::vector<std::pair<int32_t, float>> bias;  // token, what is added to its logit

  bool penalises() const { return presence != 0.0f || frequency != 0.0f || repetition != 1.0f; }
};

struct Generation {
  std::vector<int32_t> prompt;
  int32_t max_tokens = -1;  // of an answer; -1: what fits
  Sampling sampling;
  int32_t choices = 1;
  std::vector<std::string> stop;
  int32_t stop_after = -1;  // a token after which stop strings count; -1: from the beginning
  bool include_stop = false;
  bool special_text = false;
  std::vector<int32_t> stop_tokens;  // beside the model's own
  bool ignore_eos = false;
  int32_t min_tokens = 0;
  int32_t logprobs = -1;  // alternatives a token, 0..20; -1: no log-probabilities
  bool prompt_logprobs = false;
  int32_t priority = 0;  // the smaller goes first
  std::string salt;
  int32_t adapter_slot = -1;
  std::string adapter_key;
  std::vector<int64_t> grammars;  // the mask source's handles, one a choice; or empty
  int32_t thinking_budget = -1;   // tokens of an answer before thinking_end is written, where it was not before
  std::vector<int32_t> thinking_end;
  int32_t opening = -1;  // begins the thinking; an answer that begins with another token has none. -1: the prompt began it
};

enum class Finish : uint8_t { kNone, kStop, kLength, kContext, kCancelled, kError };
constexpr int kNumFinishes = 6;

struct Group;

struct Sequence {
  Group *group = nullptr;
  int32_t choice = 0;

  std::vector<int32_t> tokens;  // prompt and answer, as far as they are known
  int32_t flying = 0;           // 1: one more was sampled by a step that is not read yet
  int32_t scheduled = 0;        // how many are computed by what was launched so far
  uint32_t epoch = 0;           // rises when what was sampled but not read must not count

  int32_t place = -1;             // among those that run, or -1
  uint32_t residency = 0;         // rises when the blocks are given back
  std::vector<int32_t> blocks;
  std::vector<Hash128> chain;     // names of the whole blocks of `tokens`
  int32_t published = 0;          // how many of `blocks` have their names
  int32_t table_written = 0;      // how many of `blocks` the device's table has
  bool counts_written = false, bias_written = false;  // the device's rows of this place are this sequence's

  std::unique_ptr<TextStream> text;
  int64_t grammar = -1;
  bool thinking_over = false;
  bool begun = false;             // it ran before
  bool finished = false;

  int32_t known() const { return static_cast<int32_t>(tokens.size()); }
  int32_t pending() const { return known() + flying - scheduled; }
};

struct Group {
  int64_t id = 0;
  int64_t arrival = 0;
  std::chrono::steady_clock::time_point submitted{};
  double queued_seconds = -1;  // until its first choice began; -1: not begun
  Generation request;
  Hash128 root;
  int32_t limit = 0;        // tokens of a choice, prompt included, at which it ends
  Finish limit_finish = Finish::kLength;
  int32_t cached_tokens = -1;  // of the prompt, found when its first choice began; -1: not begun
  bool prompt_done = false;    // computed by the first choice, which the others wait for
  int32_t unfinished = 0;
  std::vector<Sequence> sequences;
  std::shared_ptr<void> adapter_lease;  // as long as this is held the adapter's slot is in use

  // Of the prompt, where asked for: of every token but the first, and of each the alternatives that were asked for.
  std::vector<float> prompt_logprobs;
  std::vector<std::pair<int32_t, float>> prompt_top;

  int32_t prompt_tokens() const { return static_cast<int32_t>(request.prompt.size()); }
  bool wants_prompt_logprobs() const { return request.prompt_logprobs; }
};

// A sequence, which keeps its group alive.
using SequenceRef = std::shared_ptr<Sequence>;

// Who goes first: by priority, then by arrival, then by choice.
inline bool goes_before(const Sequence &a, const Sequence &b) {
  if (a.group->request.priority != b.group->request.priority) return a.group->request.priority < b.group->request.priority;
  if (a.group->arrival != b.group->arrival) return a.group->arrival < b.group->arrival;
  return a.choice < b.choice;
}

}  // namespace surogate::serve

// Which tokens of which sequences go into the next step.
//
// Sequences that run come first to last by priority and age. Each that needs one token gets it; what is left of the budget
// goes to those with more to compute, and to those that wait, if their blocks can be had. Where a block is missing the
// last one that runs gives all of its own back and waits again: what it computed stays in the cache, by name, as long as
// nobody needs the memory. So the first one always goes on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "serve/blocks.h"
#include "serve/request.h"
#include "serve/step.h"

namespace surogate::serve {

struct SchedulerOptions {
  int32_t places = 0;         // sequences that run at once
  int32_t num_blocks = 0;
  int32_t block_size = 16;    // tokens
  int32_t token_budget = 0;   // of a step
  int32_t step_overhead = 0;  // what a step costs beside its tokens, in tokens
};

class SUROGATE_API Scheduler {
 public:
  // Throws Error where a number does not fit the others.
  Scheduler(const SchedulerOptions &options, HashKey key);

  // Before the first plan: what programs there are. Throws Error where they cannot run every step that may be planned.
  void set_buckets(const Buckets *buckets);

  void add(const std::shared_ptr<Group> &group);  // its sequences wait from now on
  // Fills `step` with what is to run next, and counts it as launched. Empty: nothing can run before what was launched is
  // read, or at all.
  void plan(Step &step);
  // The step of this chunk has run: whole blocks of it can be found from now on.
  void computed(const Chunk &chunk);
  // Takes a sequence out, whether it runs or waits.
  void remove(Sequence &sequence);

  const BlockPool &pool() const { return pool_; }
  BlockPool &pool() { return pool_; }
  int32_t running() const { return static_cast<int32_t>(running_.size()); }
  int32_t waiting() const { return static_cast<int32_t>(waiting_.size()); }
  int64_t preemptions() const { return preemptions_; }
  int64_t cache_queries() const { return cache_queries_; }  // tokens of sequences that began to run
  int64_t cache_hits() const { return cache_hits_; }        // how many of those were in the cache

 private:
  int32_t blocks_for(int32_t tokens) const { return (tokens + options_.block_size - 1) / options_.block_size; }
  static bool wants(const Sequence &s);
  void yield_to_waiting();
  void plan_decodes();
  void admit();
  bool try_admit(const SequenceRef &sequence);
  void plan_prompts();
  void trim_to_bucket();
  void add_chunk(Step &step, const SequenceRef &sequence, int32_t count);
  bool grow(Sequence &sequence, int32_t tokens);
  void preempt_last();
  void leave(Sequence &sequence);  // blocks and place
  int32_t share_of(const Sequence &sequence, int32_t wanted, int32_t rows_left) const;
  static int32_t prompt_rows_left(const Sequence &sequence);
  static int32_t rows_of(const Sequence &sequence, int32_t count);

  SchedulerOptions options_;
  BlockPool pool_;
  const Buckets *buckets_ = nullptr;
  int32_t max_tokens_ = 0, max_rows_ = 0;
  std::vector<SequenceRef> running_, waiting_;  // in order
  std::vector<int32_t> free_places_;
  int32_t refused_blocks_ = -1;                 // how many could be had when the first that waits did not get its own
  const Sequence *refused_ = nullptr;

  struct Share {
    SequenceRef sequence;
    int32_t count;
  };
  std::vector<Share> decodes_, prompts_;  // of the step that is being planned
  std::vector<int32_t> found_;            // blocks, while a sequence is admitted
  int64_t preemptions_ = 0, cache_queries_ = 0, cache_hits_ = 0;
};

}  // namespace surogate::serve

#include "serve/scheduler.h"

#include <algorithm>

namespace surogate::serve {

namespace {

constexpr int32_t kFairChunk = 256;    // tokens that every prompt gets before another one gets more
constexpr int32_t kPromptsAtOnce = 4;  // long ones; of short ones as many as fill a step

void insert_in_order(std::vector<SequenceRef> &list, SequenceRef sequence) {
  const auto before = [](const SequenceRef &a, const SequenceRef &b) { return goes_before(*a, *b); };
  list.insert(std::upper_bound(list.begin(), list.end(), sequence, before), std::move(sequence));
}

}  // namespace

Scheduler::Scheduler(const SchedulerOptions &options, HashKey key)
    : options_(options), pool_(options.num_blocks, options.block_size, key) {
  if (options.places < 1) throw Error("a loop needs places for at least one sequence");
  if (options.token_budget < options.places) {
    throw Error("token_budget " + std::to_string(options.token_budget) + " is less than the " +
                    std::to_string(options.places) + " places",
                "every sequence that runs takes a token of each step");
  }
  running_.reserve(static_cast<size_t>(options.places));
  decodes_.reserve(static_cast<size_t>(options.places));
  prompts_.reserve(static_cast<size_t>(options.places));
  for (int32_t place = options.places; place-- > 0;) free_places_.push_back(place);
}

void Scheduler::set_buckets(const Buckets *buckets) {
  buckets_ = buckets;
  max_tokens_ = buckets->max_tokens(false);
  max_rows_ = buckets->max_rows(false);
  if (buckets->max_tokens(true) > 0) {
    max_tokens_ = std::min(max_tokens_, buckets->max_tokens(true));
    max_rows_ = std::min(max_rows_, buckets->max_rows(true));
  }
  if (max_tokens_ < options_.places || max_rows_ < options_.places) {
    throw Error("no program takes prompt chunks beside a token of each of " + std::to_string(options_.places) + " sequences",
                "add one with at least as many tokens and rows");
  }
  for (bool adapters : {false, buckets->max_tokens(true) > 0}) {
    if (buckets->choose(max_tokens_, max_rows_, adapters, false) < 0) {
      throw Error("no program takes " + std::to_string(max_tokens_) + " tokens and " + std::to_string(max_rows_) + " rows");
    }
  }
  max_tokens_ = std::min(max_tokens_, options_.token_budget);
}

void Scheduler::add(const std::shared_ptr<Group> &group) {
  for (Sequence &sequence : group->sequences) insert_in_order(waiting_, SequenceRef(group, &sequence));
}

// Whether there is something to compute for it. What is sampled by a step that is not read yet may complete it.
bool Scheduler::wants(const Sequence &s) {
  return s.pending() > 0 && !(s.flying > 0 && s.known() + s.flying >= s.group->limit);
}

void Scheduler::plan(Step &step) {
  step.clear();
  yield_to_waiting();
  plan_decodes();
  admit();
  plan_prompts();
  trim_to_bucket();
  for (const Share &share : decodes_) add_chunk(step, share.sequence, share.count);
  for (const Share &share : prompts_) {
    if (share.count > 0) add_chunk(step, share.sequence, share.count);
  }
  decodes_.clear();  // nothing may keep a request that is complete, and with it its adapter's slot
  prompts_.clear();
  if (step.chunks.empty()) return;
  const bool decodes = std::all_of(step.chunks.begin(), step.chunks.end(),
                                   [](const Chunk &chunk) { return chunk.count == 1 && chunk.rows() == 1; });
  step.bucket = buckets_->choose(step.tokens, step.rows, step.adapters, decodes);
  if (step.bucket < 0) {
    throw Error("no program takes " + std::to_string(step.tokens) + " tokens, " + std::to_string(step.rows) + " rows and " +
                (step.adapters ? "adapters" : "no adapters"));
  }
}

// Whoever waits with a better priority gets the place and the blocks of those that run with a worse one.
void Scheduler::yield_to_waiting() {
  if (waiting_.empty()) return;
  const Sequence &first = *waiting_.front();
  if (first.flying > 0 || (first.choice > 0 && !first.group->prompt_done)) return;
  while (!running_.empty() && running_.back()->group->request.priority > first.group->request.priority) {
    if (!free_places_.empty() && pool_.available() > blocks_for(first.known())) return;
    preempt_last();
  }
}

void Scheduler::plan_decodes() {
  for (size_t i = 0; i < running_.size(); ++i) {  // growing takes from the end
    if (static_cast<int32_t>(decodes_.size()) == max_tokens_) return;
    const SequenceRef sequence = running_[i];
    if (!wants(*sequence)) continue;
    // Several are pending of a prompt, whose blocks it has, and where tokens were forced, whose blocks it may lack.
    const int32_t pending = sequence->pending();
    if (grow(*sequence, sequence->scheduled + pending) && pending == 1) decodes_.push_back({sequence, 1});
  }
}

// Blocks for so many of its tokens. False: it had to give up its own.
bool Scheduler::grow(Sequence &sequence, int32_t tokens) {
  while (blocks_for(tokens) > static_cast<int32_t>(sequence.blocks.size())) {
    int32_t block = -1;
    while (!pool_.allocate({&block, 1})) {
      const bool itself = running_.back().get() == &sequence;
      preempt_last();
      if (itself) return false;
    }
    sequence.blocks.push_back(block);
  }
  return true;
}

void Scheduler::preempt_last() {
  const SequenceRef last = std::move(running_.back());
  running_.pop_back();
  leave(*last);
  insert_in_order(waiting_, last);
  preemptions_ += 1;
}

void Scheduler::leave(Sequence &sequence) {
  if (sequence.place < 0) return;
  pool_.release(sequence.blocks);
  sequence.blocks.clear();
  free_places_.push_back(sequence.place);
  sequence.place = -1;
  sequence.residency += 1;
  sequence.scheduled = sequence.published = sequence.table_written = 0;
  sequence.counts_written = sequence.bias_written = false;
}

void Scheduler::admit() {
  // A long prompt counts as a share of a step only, so that others begin beside it.
  const int32_t most = std::max(1, max_tokens_ / kPromptsAtOnce);
  int32_t pending = static_cast<int32_t>(decodes_.size());
  for (const SequenceRef &sequence : running_) {
    if (sequence->pending() > 1) pending += std::min(sequence->pending(), most);
  }
  for (size_t i = 0; i < waiting_.size() && !free_places_.empty() && pending < max_tokens_;) {
    const SequenceRef sequence = waiting_[i];
    // Its last token is not known, or will be found in the cache with the rest of the prompt in a moment.
    if (sequence->flying > 0 || (sequence->choice > 0 && !sequence->group->prompt_done)) {
      ++i;
      continue;
    }
    if (!try_admit(sequence)) return;
    pending += std::min(sequence->pending(), most);
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    insert_in_order(running_, sequence);
  }
}

bool Scheduler::try_admit(const SequenceRef &sequence) {
  Sequence &s = *sequence;
  if (!running_.empty() && refused_ == &s && refused_blocks_ == pool_.available()) return false;
  Group &group = *s.group;
  pool_.extend(s.chain, group.root, s.tokens);
  const int32_t needed = blocks_for(s.known());
  // One token at least is computed: its logits are wanted. The logits of the prompt need all of it.
  const bool whole = group.wants_prompt_logprobs() && !group.prompt_done;
  const size_t usable = whole ? 0 : std::min(s.chain.size(), static_cast<size_t>((s.known() - 1) / options_.block_size));
  found_.resize(static_cast<size_t>(needed));
  const int32_t found = pool_.match(std::span(s.chain).first(usable), found_);
  // Beside its own, room for those that run to grow: or one that was just let in would be sent back.
  const int32_t growth = running_.empty() ? 0 : 1 + running() / 8;
  if (pool_.available() < needed - found + growth ||
      !pool_.allocate(std::span(found_).subspan(static_cast<size_t>(found)))) {
    pool_.release(std::span(found_).first(static_cast<size_t>(found)));
    refused_ = &s;
    refused_blocks_ = pool_.available();
    return false;
  }
  refused_ = nullptr;
  s.blocks.assign(found_.begin(), found_.end());
  s.published = found;
  s.scheduled = found * options_.block_size;
  s.place = free_places_.back();
  free_places_.pop_back();
  if (!s.begun && s.choice == 0) {
    group.cached_tokens = std::min(s.scheduled, group.prompt_tokens());
    group.queued_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - group.submitted).count();
  }
  s.begun = true;
  cache_queries_ += s.known();
  cache_hits_ += s.scheduled;
  return true;
}

// Of the tokens that are to be computed, how many are about the prompt's next one, whose log-probability is wanted.
int32_t Scheduler::prompt_rows_left(const Sequence &s) {
  if (!s.group->wants_prompt_logprobs() || s.group->prompt_done) return 0;
  return std::max(0, s.group->prompt_tokens() - 1 - s.scheduled);
}

// Rows of logits for `count` more tokens of a sequence.
int32_t Scheduler::rows_of(const Sequence &s, int32_t count) {
  const bool samples = s.scheduled + count == s.known() + s.flying;
  return std::min(count, prompt_rows_left(s)) + (samples ? 1 : 0);
}

// How many of `wanted` tokens can be had with so many rows.
int32_t Scheduler::share_of(const Sequence &s, int32_t wanted, int32_t rows_left) const {
  if (wanted == 0 || rows_of(s, wanted) <= rows_left) return wanted;
  return rows_left < prompt_rows_left(s) ? std::min(wanted - 1, rows_left) : wanted - 1;
}

// The oldest first, but none takes it all while others wait for their first tokens.
void Scheduler::plan_prompts() {
  int32_t left = max_tokens_ - static_cast<int32_t>(decodes_.size());
  int32_t rows_left = max_rows_ - static_cast<int32_t>(decodes_.size());
  size_t next_decode = 0;  // both lists are in order
  for (const SequenceRef &sequence : running_) {
    if (next_decode < decodes_.size() && decodes_[next_decode].sequence == sequence) {
      next_decode += 1;
    } else if (wants(*sequence)) {
      prompts_.push_back({sequence, 0});
    }
  }
  if (prompts_.empty()) return;
  const int32_t fair = std::max(std::min(kFairChunk, std::max(1, max_tokens_ / kPromptsAtOnce)),
                                left / static_cast<int32_t>(prompts_.size()));
  for (int32_t most : {fair, left}) {
    for (Share &share : prompts_) {
      const int32_t wanted = std::min({share.sequence->pending(), share.count + left, std::max(most, share.count)});
      rows_left += share.count > 0 ? rows_of(*share.sequence, share.count) : 0;
      const int32_t count = std::max(share.count, share_of(*share.sequence, wanted, rows_left));
      rows_left -= count > 0 ? rows_of(*share.sequence, count) : 0;
      left -= count - share.count;
      share.count = count;
    }
  }
}

// A program runs as long for padding as for tokens. Where a smaller one, and another for the rest, take less than the one
// that all would fit into, the rest is left for later.
void Scheduler::trim_to_bucket() {
  int32_t prompt_tokens = 0;
  bool adapters = false;
  for (const Share &share : prompts_) {
    prompt_tokens += share.count;
    adapters |= share.sequence->group->request.adapter_slot >= 0;
  }
  if (prompt_tokens == 0) return;
  for (const Share &share : decodes_) adapters |= share.sequence->group->request.adapter_slot >= 0;
  const int32_t total = prompt_tokens + static_cast<int32_t>(decodes_.size());
  const int32_t rows = static_cast<int32_t>(decodes_.size() + prompts_.size());
  const int32_t whole = buckets_->choose(total, rows, adapters, false);
  const int32_t below = buckets_->below(total, rows, adapters);
  if (whole < 0 || below <= static_cast<int32_t>(decodes_.size())) return;
  int32_t rest = total - below;
  const int32_t later = buckets_->choose(rest, 0, adapters, rest == 1);
  const auto tokens_of = [&](int32_t bucket) { return (*buckets_)[static_cast<size_t>(bucket)].tokens; };
  if (later < 0 || below + tokens_of(later) + options_.step_overhead >= tokens_of(whole)) return;
  for (size_t i = prompts_.size(); i-- > 0 && rest > 0;) {
    const int32_t taken = std::min(rest, prompts_[i].count);
    prompts_[i].count -= taken;
    rest -= taken;
  }
}

void Scheduler::add_chunk(Step &step, const SequenceRef &sequence, int32_t count) {
  Sequence &s = *sequence;
  const Generation &request = s.group->request;
  Chunk chunk;
  chunk.sequence = sequence;
  chunk.first = s.scheduled;
  chunk.count = count;
  chunk.row = step.rows;
  chunk.samples = s.scheduled + count == s.known() + s.flying;
  chunk.prompt_rows = rows_of(s, count) - (chunk.samples ? 1 : 0);
  chunk.epoch = s.epoch;
  chunk.residency = s.residency;
  step.tokens += count;
  step.rows += chunk.rows();
  step.adapters |= request.adapter_slot >= 0;
  if (chunk.samples) {
    const int32_t answered = s.known() + s.flying - s.group->prompt_tokens();
    step.full |= request.sampling.penalises() || !request.sampling.bias.empty() || s.grammar >= 0 ||
                 answered < request.min_tokens;
    step.logprobs |= request.logprobs >= 0;
    s.flying += 1;
  }
  step.logprobs |= chunk.prompt_rows > 0;
  s.scheduled += count;
  step.chunks.push_back(std::move(chunk));
}

void Scheduler::computed(const Chunk &chunk) {
  Sequence &s = *chunk.sequence;
  if (chunk.residency != s.residency || s.place < 0) return;
  const int32_t whole = (chunk.first + chunk.count) / options_.block_size;
  if (whole <= s.published) return;
  pool_.extend(s.chain, s.group->root, s.tokens);
  for (; s.published < whole; ++s.published) {
    const size_t block = static_cast<size_t>(s.published);
    pool_.publish(s.blocks[block], s.chain[block]);
  }
}

void Scheduler::remove(Sequence &sequence) {
  const auto erase = [&](std::vector<SequenceRef> &list) {
    const auto at = std::find_if(list.begin(), list.end(), [&](const SequenceRef &s) { return s.get() == &sequence; });
    if (at != list.end()) list.erase(at);
  };
  if (sequence.place >= 0) {
    erase(running_);
  } else {
    erase(waiting_);
  }
  leave(sequence);
  if (refused_ == &sequence) refused_ = nullptr;
}

}  // namespace surogate::serve

#include "serve/loop.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <span>

namespace surogate::serve {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// Of a processor, for this thread: what others did in the meantime does not count.
double processor_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The longest wait that a clock can add to its own time.
std::chrono::duration<double> capped(double seconds) { return std::chrono::duration<double>(std::clamp(seconds, 0.0, 1e8)); }

}  // namespace

// How many requests use each adapter slot. Outlives the loop: a request's lease may.
struct Loop::Uses {
  std::mutex mutex;
  std::map<int32_t, int64_t> of;

  struct Lease {
    std::shared_ptr<Uses> uses;
    int32_t slot;
    Lease(std::shared_ptr<Uses> uses, int32_t slot) : uses(std::move(uses)), slot(slot) { add(1); }
    ~Lease() { add(-1); }
    Lease(const Lease &) = delete;
    Lease &operator=(const Lease &) = delete;
    void add(int64_t count) {
      std::lock_guard lock(uses->mutex);
      uses->of[slot] += count;
    }
  };
};

Loop::Loop(const LoopOptions &options)
    : options_(options),
      scheduler_(options.scheduler, options.hash_key),
      runner_(options.scheduler.places, options.scheduler.block_size, options.vocab),
      uses_(std::make_shared<Uses>()) {
  if (options.context < 2) throw Error("a loop's context must hold a prompt and an answer");
  if (options.max_requests < 1) throw Error("a loop must take at least one request");
  set_texts({});
}

Loop::~Loop() { stop(); }

void Loop::set_texts(Texts texts) {
  if (texts.tokenizer == nullptr) {
    texts.tokenizer = std::make_shared<const Tokenizer>(std::string(), std::vector<uint64_t>{0}, std::vector<uint8_t>());
  }
  std::sort(texts.stop_tokens.begin(), texts.stop_tokens.end());
  answers_.texts = std::move(texts);
}

void Loop::start() {
  if (started_) throw Error("the loop was started before");
  if (runner_.buckets().size() == 0) throw Error("the loop has no programs", "add_session before start");
  scheduler_.set_buckets(&runner_.buckets());
  const int32_t blocks = std::min(options_.scheduler.num_blocks, runner_.table_width());
  context_ = static_cast<int32_t>(
      std::min<int64_t>(options_.context, int64_t{blocks} * options_.scheduler.block_size));
  for (Flight &flight : flights_) {
    flight.readback = runner_.make_readback();
    flight.step.chunks.reserve(static_cast<size_t>(options_.scheduler.places));
  }
  if (!runner_.is_host()) runner_.warm_up();
  shown_.blocks = counted_.blocks = scheduler_.pool().stats();
  shown_.alive = counted_.alive = true;
  started_ = true;
  thread_ = std::thread([this] { work(); });
}

// ---- other threads

Refusal Loop::check(const Generation &g) const {
  const auto invalid = [](std::string message) { return Refusal{"invalid", std::move(message)}; };
  const auto known = [&](int32_t token) { return token >= 0 && token < options_.vocab; };
  if (g.prompt.empty()) return invalid("the prompt has no tokens");
  if (!std::all_of(g.prompt.begin(), g.prompt.end(), known)) return invalid("the prompt has a token that the model has not");
  if (!std::all_of(g.thinking_end.begin(), g.thinking_end.end(), known)) return invalid("thinking ends in an unknown token");
  for (const auto &[token, bias] : g.sampling.bias) {
    if (!known(token) || !std::isfinite(bias)) return invalid("logit_bias: not a token of the model, or not a finite number");
  }
  const Sampling &s = g.sampling;
  for (float number : {s.temperature, s.top_p, s.min_p, s.presence, s.frequency, s.repetition}) {
    if (!std::isfinite(number)) return invalid("a sampling setting is not a finite number");
  }
  if (s.temperature < 0.0f || s.top_k < 0 || s.repetition <= 0.0f) return invalid("a sampling setting is out of its range");
  if (g.choices < 1) return invalid("the number of choices must be at least 1");
  if (g.max_tokens < -1 || g.min_tokens < 0) return invalid("max_tokens and min_tokens must not be negative");
  if (g.logprobs < -1 || g.logprobs > kMaxAlternatives) return invalid("logprobs must be between 0 and 20");
  if (!g.grammars.empty() && static_cast<int32_t>(g.grammars.size()) != g.choices) return invalid("one grammar a choice");
  if (!g.grammars.empty() && masks_ == nullptr) return invalid("this loop has nothing that knows grammars");
  if (std::any_of(g.stop.begin(), g.stop.end(), [](const std::string &stop) { return stop.empty(); })) {
    return invalid("a stop string is empty");
  }
  if (g.adapter_slot >= 0 && runner_.buckets().max_tokens(true) == 0) return invalid("this loop has no programs with adapters");
  const int64_t prompt = static_cast<int64_t>(g.prompt.size());
  if (prompt + (g.max_tokens == 0 ? 0 : 1) > context_) {
    return {"context", "the prompt has " + std::to_string(prompt) +
                           " tokens, which leaves no room for an answer in a context of " + std::to_string(context_)};
  }
  return {};
}

Refusal Loop::submit(Generation generation, int64_t &id) {
  if (!started_) return {"invalid", "the loop was not started"};
  if (Refusal refusal = check(generation); refusal.reason != nullptr) return refusal;
  auto group = std::make_shared<Group>();
  group->request = std::move(generation);
  const Generation &request = group->request;
  const int64_t wanted = request.max_tokens < 0 ? context_ : int64_t{group->prompt_tokens()} + request.max_tokens;
  group->limit = static_cast<int32_t>(std::min<int64_t>(wanted, context_));
  group->limit_finish = wanted > context_ || request.max_tokens < 0 ? Finish::kContext : Finish::kLength;
  const Extra extras[] = {{ExtraKind::kModelGeneration, options_.model_key},
                          {ExtraKind::kAdapter, request.adapter_key},
                          {ExtraKind::kSalt, request.salt}};
  group->root = scheduler_.pool().root(extras);
  if (request.adapter_slot >= 0) group->adapter_lease = std::make_shared<Uses::Lease>(uses_, request.adapter_slot);
  group->unfinished = request.choices;
  group->sequences.resize(static_cast<size_t>(request.choices));
  for (size_t i = 0; i < group->sequences.size(); ++i) {
    Sequence &sequence = group->sequences[i];
    sequence.group = group.get();
    sequence.choice = static_cast<int32_t>(i);
    const size_t room = static_cast<size_t>(std::min(group->limit, group->prompt_tokens() + 4096)) + 1;
    sequence.tokens.reserve(room);
    sequence.tokens.assign(request.prompt.begin(), request.prompt.end());
    sequence.chain.reserve(room / static_cast<size_t>(options_.scheduler.block_size) + 1);
    sequence.blocks.reserve(sequence.chain.capacity());
    if (!request.grammars.empty()) sequence.grammar = request.grammars[i];
  }
  answers_.begin(*group);
  std::lock_guard lock(mutex_);
  if (ended_ || stopping_) return {"dead", shown_.dead.empty() ? "the loop was stopped" : shown_.dead};
  if (draining_) return {"draining", "no more requests are taken"};
  if (incomplete_ >= options_.max_requests) {
    return {"full", std::to_string(incomplete_) + " requests run or wait already"};
  }
  id = group->id = group->arrival = next_id_++;
  group->submitted = Clock::now();
  incomplete_ += 1;
  submitted_.push_back(std::move(group));
  work_.notify_one();
  return {};
}

void Loop::cancel(int64_t id, int32_t choice) {
  std::lock_guard lock(mutex_);
  to_cancel_.push_back({id, choice});
  work_.notify_one();
}

void Loop::poll(double timeout, Deltas &deltas) {
  deltas.clear();
  std::unique_lock lock(mutex_);
  told_.wait_for(lock, capped(timeout), [&] { return !ready_.empty() || ended_; });
  std::swap(deltas, ready_);
  if (deltas.empty() && !shown_.dead.empty()) throw Error("the engine's loop ended: " + shown_.dead);
}

Stats Loop::stats() const {
  std::lock_guard lock(mutex_);
  return shown_;
}

int64_t Loop::uses(int32_t adapter_slot) const {
  std::lock_guard lock(uses_->mutex);
  const auto found = uses_->of.find(adapter_slot);
  return found == uses_->of.end() ? 0 : found->second;
}

bool Loop::drain(double timeout) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  return told_.wait_for(lock, capped(timeout), [&] { return incomplete_ == 0 || ended_; }) && incomplete_ == 0;
}

void Loop::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    work_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

// ---- the thread

void Loop::work() {
  std::string reason;
  try {
    while (take_commands()) {
      turn();
      deliver();
    }
  } catch (const Error &error) {
    reason = error.message;
  } catch (const std::exception &error) {
    reason = error.what();
  }
  for (; flying_ > 0; --flying_, oldest_ ^= 1) flights_[oldest_].step.clear();
  if (runner_.queue() != nullptr) runner_.queue()->settle();
  {
    std::lock_guard lock(mutex_);
    counted_.alive = false;
    counted_.dead = reason;
    stopping_ = true;  // nothing is taken from here on
    for (std::shared_ptr<Group> &group : submitted_) arrived_.push_back(std::move(group));
    submitted_.clear();
  }
  for (std::shared_ptr<Group> &group : arrived_) {
    if (group == nullptr) continue;
    const int64_t id = group->id;
    groups_.emplace(id, std::move(group));
  }
  arrived_.clear();
  end_all(reason.empty() ? Finish::kCancelled : Finish::kError, reason);
  deliver();
  std::lock_guard lock(mutex_);
  ended_ = true;
  told_.notify_all();
}

// Takes over what other threads asked for; waits where nothing else is to be done. False: the loop is to end.
bool Loop::take_commands() {
  {
    std::unique_lock lock(mutex_);
    if (groups_.empty() && flying_ == 0) {
      work_.wait(lock, [&] { return stopping_ || !submitted_.empty() || !to_cancel_.empty(); });
    }
    if (stopping_) return false;
    std::swap(arrived_, submitted_);
    std::swap(cancelled_, to_cancel_);
  }
  for (std::shared_ptr<Group> &group : arrived_) add(std::move(group));
  arrived_.clear();
  for (const Cancelled &which : cancelled_) cancel_now(which);
  cancelled_.clear();
  return true;
}

void Loop::turn() {
  if (flying_ > 0 && must_read_first()) collect();
  Flight &next = flights_[oldest_ ^ (flying_ & 1)];
  const double begin = processor_seconds();
  scheduler_.plan(next.step);
  counted_.planning_seconds += processor_seconds() - begin;
  const bool something = !next.step.chunks.empty();
  if (something) {
    launch(next);
  } else if (flying_ == 0 && !groups_.empty()) {
    throw Error("nothing can run, and " + std::to_string(groups_.size()) + " requests are not complete");
  }
  if (flying_ > (options_.run_ahead && something ? 1 : 0)) collect();
}

void Loop::launch(Flight &flight) {
  const double begin = processor_seconds();
  Step &step = flight.step;
  counted_.steps += 1;
  counted_.step_tokens += step.tokens;
  counted_.padded_tokens += runner_.buckets()[static_cast<size_t>(step.bucket)].tokens - step.tokens;
  try {
    if (step.full) fill_masks(step);
    runner_.launch(step, *flight.readback);
    flying_ += 1;
  } catch (const Error &error) {
    masked_chunks_.clear();
    runner_.drop_masks();
    fail(step, error.message);
  }
  for (size_t i = 0; i < masked_chunks_.size(); ++i) {
    if (failed_masks_[i] && !masked_chunks_[i]->sequence->finished) {
      end(*masked_chunks_[i]->sequence, Finish::kError, "the grammar could not say what may come next");
    }
  }
  masked_chunks_.clear();
  counted_.launching_seconds += processor_seconds() - begin;
}

// What a grammar allows follows from the token before, which must be known.
bool Loop::must_read_first() const {
  const Step &step = flights_[oldest_].step;
  return std::any_of(step.chunks.begin(), step.chunks.end(), [](const Chunk &chunk) {
    return chunk.samples && chunk.sequence->grammar >= 0 && !chunk.sequence->finished;
  });
}

// Masks of the step's rows: what the grammars allow, without what would end an answer too early.
void Loop::fill_masks(const Step &step) {
  masked_chunks_.clear();
  handles_.clear();
  for (const Chunk &chunk : step.chunks) {
    if (!chunk.samples || chunk.sequence->grammar < 0) continue;
    masked_chunks_.push_back(&chunk);
    handles_.push_back(chunk.sequence->grammar);
  }
  const size_t words = static_cast<size_t>(runner_.mask_words());
  failed_masks_.assign(handles_.size(), 0);
  if (!handles_.empty()) {
    mask_rows_.resize(handles_.size() * words);
    masks_->fill(handles_, mask_rows_.data(), runner_.mask_words(), failed_masks_);
  }
  size_t next = 0;
  for (const Chunk &chunk : step.chunks) {
    const Sequence &s = *chunk.sequence;
    const bool too_early = chunk.first + chunk.count - s.group->prompt_tokens() < s.group->request.min_tokens;
    if (!chunk.samples || (s.grammar < 0 && !too_early)) continue;
    const std::span<uint32_t> mask = runner_.mask(chunk.sampled_row());
    std::fill(mask.begin(), mask.end(), ~uint32_t{0});
    if (s.grammar >= 0) {
      if (!failed_masks_[next]) std::copy_n(mask_rows_.data() + next * words, words, mask.begin());
      next += 1;
    }
    if (too_early) answers_.forbid_stops(s.group->request, mask);
  }
}

void Loop::fail(Step &step, const std::string &message) {
  for (const Chunk &chunk : step.chunks) {
    if (!chunk.sequence->finished) end(*chunk.sequence, Finish::kError, message);
  }
  step.clear();
  counted_.failures += 1;
  failures_in_row_ += 1;
  if (failures_in_row_ > 1) throw Error("two steps in a row failed, the last: " + message);
}

void Loop::collect() {
  Flight &flight = flights_[oldest_];
  oldest_ ^= 1;
  flying_ -= 1;
  Results results;
  const auto begin = Clock::now();
  try {
    results = runner_.wait(flight.step, *flight.readback);
  } catch (const Error &error) {
    fail(flight.step, error.message);
    return;
  }
  counted_.waiting_seconds += seconds_since(begin);
  const double read = processor_seconds();
  failures_in_row_ = 0;
  judge(flight.step, results);
  size_t next = 0;
  for (const Chunk &chunk : flight.step.chunks) {
    const bool judged = chunk.samples && chunk.sequence->grammar >= 0;
    read_chunk(chunk, results, judged ? verdicts_[next++] : Verdict::kGoesOn);
  }
  flight.step.clear();
  counted_.reading_seconds += processor_seconds() - read;
}

// Asks about the tokens of choices with a grammar, all at once.
void Loop::judge(const Step &step, const Results &results) {
  handles_.clear();
  handle_tokens_.clear();
  verdicts_.clear();
  for (const Chunk &chunk : step.chunks) {
    const Sequence &s = *chunk.sequence;
    if (!chunk.samples || s.grammar < 0) continue;
    const int32_t token = results.sampled[chunk.sampled_row()];
    verdicts_.push_back(Verdict::kGoesOn);
    if (s.finished || chunk.epoch != s.epoch || token < 0) continue;
    handles_.push_back(s.grammar);
    handle_tokens_.push_back(token);
  }
  if (handles_.empty()) return;
  said_.assign(handles_.size(), Verdict::kGoesOn);
  masks_->accept(handles_, handle_tokens_, said_);
  size_t next = 0, row = 0;
  for (const Chunk &chunk : step.chunks) {
    const Sequence &s = *chunk.sequence;
    if (!chunk.samples || s.grammar < 0) continue;
    if (!s.finished && chunk.epoch == s.epoch && results.sampled[chunk.sampled_row()] >= 0) verdicts_[row] = said_[next++];
    row += 1;
  }
}

void Loop::read_chunk(const Chunk &chunk, const Results &results, Verdict verdict) {
  Sequence &s = *chunk.sequence;
  if (s.finished) {
    counted_.discarded_tokens += chunk.samples ? 1 : 0;
    return;
  }
  const int32_t row = chunk.sampled_row();
  const int32_t token = chunk.samples ? results.sampled[row] : 0;
  if (token >= 0) scheduler_.computed(chunk);
  if (chunk.prompt_rows > 0) keep_prompt_logprobs(chunk, results);
  if (!chunk.samples) return;
  if (chunk.epoch != s.epoch) {
    counted_.discarded_tokens += 1;
    return;
  }
  s.flying -= 1;
  Group &group = *s.group;
  if (s.choice == 0 && !group.prompt_done) {
    group.prompt_done = true;
    counted_.prompt_tokens += group.prompt_tokens();
    counted_.cached_tokens += std::max(group.cached_tokens, 0);
    if (group.wants_prompt_logprobs()) answers_.tell_prompt(s);
  }
  if (s.known() >= group.limit) return end(s, group.limit_finish);  // no token was asked for
  if (token < 0 || token >= runner_.vocab()) {
    // Keys and values of an earlier chunk may be no numbers either, and others may have found them.
    if (s.grammar < 0) scheduler_.pool().forget();
    return end(s, Finish::kError, "no token could be drawn: the model's logits are not numbers, or none is allowed");
  }
  TokenRow about;
  if (group.request.logprobs >= 0) {
    about = {results.logprobs + row, results.top_ids + int64_t{row} * kMaxAlternatives,
             results.top_logprobs + int64_t{row} * kMaxAlternatives};
  }
  counted_.generated_tokens += 1;
  const Finish finish = answers_.take(s, token, about, verdict);
  if (finish != Finish::kNone) return retire(s, finish);
  force(s);
}

void Loop::keep_prompt_logprobs(const Chunk &chunk, const Results &results) {
  Group &group = *chunk.sequence->group;
  const size_t count = static_cast<size_t>(group.prompt_tokens() - 1);
  const size_t alternatives = static_cast<size_t>(std::max(group.request.logprobs, 0));
  group.prompt_logprobs.resize(count);
  group.prompt_top.resize(count * alternatives);
  for (int32_t i = 0; i < chunk.prompt_rows; ++i) {
    const size_t at = static_cast<size_t>(chunk.first + i);
    const int64_t row = chunk.row + i;
    group.prompt_logprobs[at] = results.logprobs[row];
    for (size_t a = 0; a < alternatives; ++a) {
      const int64_t from = row * kMaxAlternatives + static_cast<int64_t>(a);
      group.prompt_top[at * alternatives + a] = {results.top_ids[from], results.top_logprobs[from]};
    }
  }
}

// Appends what the choice must go on with. What was sampled in the meantime comes in another place, and does not count.
void Loop::force(Sequence &s) {
  const std::span<const int32_t> tokens = answers_.forced(s);
  if (tokens.empty()) return;
  s.epoch += 1;
  s.flying = 0;
  s.counts_written = false;
  for (int32_t token : tokens) {
    Verdict verdict = Verdict::kGoesOn;
    if (s.grammar >= 0) masks_->accept({&s.grammar, 1}, {&token, 1}, {&verdict, 1});
    counted_.generated_tokens += 1;
    const Finish finish = answers_.take(s, token, {}, verdict, true);
    if (finish != Finish::kNone) return retire(s, finish);
  }
}

// ---- requests

void Loop::add(std::shared_ptr<Group> group) {
  counted_.requests += 1;
  scheduler_.add(group);
  Group &added = *group;
  groups_.emplace(added.id, std::move(group));
  for (Sequence &sequence : added.sequences) force(sequence);  // a budget of no thinking at all
}

void Loop::cancel_now(const Cancelled &which) {
  const auto found = groups_.find(which.id);
  if (found == groups_.end()) return;
  const std::shared_ptr<Group> group = found->second;
  for (Sequence &sequence : group->sequences) {
    if (!sequence.finished && (which.choice < 0 || which.choice == sequence.choice)) end(sequence, Finish::kCancelled);
  }
}

void Loop::end(Sequence &sequence, Finish finish, const std::string &error) {
  answers_.end(sequence, finish, error);
  retire(sequence, answers_.deltas.items.back().finish);
}

void Loop::retire(Sequence &sequence, Finish finish) {
  Group &group = *sequence.group;
  scheduler_.remove(sequence);
  counted_.finished[static_cast<size_t>(finish)] += 1;
  if (sequence.choice == 0) group.prompt_done = true;  // the others need not wait any longer
  group.unfinished -= 1;
  if (group.unfinished == 0) groups_.erase(group.id);
}

void Loop::end_all(Finish finish, const std::string &error) {
  while (!groups_.empty()) {
    const std::shared_ptr<Group> group = groups_.begin()->second;
    for (Sequence &sequence : group->sequences) {
      if (!sequence.finished) end(sequence, finish, error);
    }
  }
}

// Shows the other threads where the loop is.
void Loop::deliver() {
  counted_.blocks = scheduler_.pool().stats();
  counted_.running = scheduler_.running();
  counted_.waiting = scheduler_.waiting();
  counted_.preemptions = scheduler_.preemptions();
  counted_.cache_queries = scheduler_.cache_queries();
  counted_.cache_hits = scheduler_.cache_hits();
  std::lock_guard lock(mutex_);
  shown_ = counted_;
  incomplete_ = static_cast<int64_t>(groups_.size() + submitted_.size());
  if (answers_.deltas.empty()) return;
  if (ready_.empty()) {
    std::swap(ready_, answers_.deltas);
  } else {
    ready_.append(answers_.deltas);
  }
  answers_.deltas.clear();
  told_.notify_all();
}

}  // namespace surogate::serve

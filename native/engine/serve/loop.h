// The loop that serves a model: a thread that plans steps, runs them, and hands out what came of them.
//
// On a device it is one step ahead: step N + 1 is on its way before what N sampled is read, and takes those ids from the
// device's memory. What turns out to be past an answer's end is discarded when it is read.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "serve/answer.h"
#include "serve/runner.h"
#include "serve/scheduler.h"

namespace surogate::serve {

struct LoopOptions {
  SchedulerOptions scheduler;
  int32_t context = 0;  // tokens of a sequence, as the model can take them
  int32_t vocab = 0;
  bool run_ahead = false;
  int32_t max_requests = 0;  // that are not complete
  HashKey hash_key;
  std::string model_key;  // which weights: blocks of others are never found
};

struct Stats {
  BlockStats blocks;
  int64_t running = 0, waiting = 0;  // sequences, now
  int64_t requests = 0;              // taken, since the start
  int64_t finished[kNumFinishes] = {};  // choices, by why
  int64_t prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0;
  int64_t steps = 0, step_tokens = 0, padded_tokens = 0, failures = 0, preemptions = 0, discarded_tokens = 0;
  int64_t cache_queries = 0, cache_hits = 0;
  // Of the thread's processor, but for the waiting, which is for a device.
  double planning_seconds = 0, launching_seconds = 0, waiting_seconds = 0, reading_seconds = 0;
  bool alive = false;
  std::string dead;  // why the loop ended, or ""
};

// Why a request is not taken.
struct Refusal {
  const char *reason = nullptr;  // "invalid", "context", "full", "draining", "dead"; nullptr: it is taken
  std::string message;
};

class SUROGATE_API Loop {
 public:
  explicit Loop(const LoopOptions &options);
  ~Loop();  // as `stop`
  Loop(const Loop &) = delete;
  Loop &operator=(const Loop &) = delete;

  // Before `start`. Throws Error.
  void add_session(Session &session, Bucket bucket) { runner_.add(session, bucket); }
  void set_texts(Texts texts);
  void set_mask_source(std::shared_ptr<MaskSource> source) { masks_ = std::move(source); }
  void start();

  int32_t context() const { return context_; }  // of a sequence, as memory and tables allow it; once started
  // From any thread. Takes `generation` and sets `id`, or says why not.
  Refusal submit(Generation generation, int64_t &id);
  void cancel(int64_t id, int32_t choice = -1);  // one choice, or all; what is complete, or never was: nothing
  // Waits until there is something, for `timeout` seconds at most. Throws Error once the loop is dead and all is told.
  void poll(double timeout, Deltas &deltas);
  Stats stats() const;
  int64_t uses(int32_t adapter_slot) const;  // requests that run or wait with it
  // Takes no more requests, and waits until those there are complete, for `timeout` seconds at most. Whether they are.
  bool drain(double timeout);
  void stop();  // ends what is not complete as cancelled

 private:
  struct Flight {
    Step step;
    std::unique_ptr<Readback> readback;
  };
  struct Uses;
  struct Cancelled {
    int64_t id;
    int32_t choice;  // -1: all
  };

  Refusal check(const Generation &generation) const;
  void work();
  bool take_commands();
  void turn();
  void launch(Flight &flight);
  void collect();
  bool must_read_first() const;
  void fill_masks(const Step &step);
  void fail(Step &step, const std::string &message);
  void judge(const Step &step, const Results &results);
  void read_chunk(const Chunk &chunk, const Results &results, Verdict verdict);
  void keep_prompt_logprobs(const Chunk &chunk, const Results &results);
  void force(Sequence &sequence);
  void add(std::shared_ptr<Group> group);
  void cancel_now(const Cancelled &which);
  void end(Sequence &sequence, Finish finish, const std::string &error = {});
  void retire(Sequence &sequence, Finish finish);
  void end_all(Finish finish, const std::string &error);
  void deliver();

  LoopOptions options_;
  Scheduler scheduler_;
  Runner runner_;
  Answers answers_;
  std::shared_ptr<MaskSource> masks_;
  int32_t context_ = 0;
  std::shared_ptr<Uses> uses_;

  // The thread's own.
  std::unordered_map<int64_t, std::shared_ptr<Group>> groups_;
  Flight flights_[2];
  int32_t oldest_ = 0, flying_ = 0;
  int32_t failures_in_row_ = 0;
  Stats counted_;
  std::vector<std::shared_ptr<Group>> arrived_;
  std::vector<Cancelled> cancelled_;
  std::vector<int64_t> handles_;          // grammars of a step, with
  std::vector<int32_t> handle_tokens_;
  std::vector<Verdict> verdicts_, said_;
  std::vector<uint8_t> failed_masks_;
  std::vector<uint32_t> mask_rows_;
  std::vector<const Chunk *> masked_chunks_;

  // Between threads.
  mutable std::mutex mutex_;
  std::condition_variable work_, told_;
  std::vector<std::shared_ptr<Group>> submitted_;
  std::vector<Cancelled> to_cancel_;
  Deltas ready_;
  Stats shown_;
  int64_t next_id_ = 0, incomplete_ = 0;
  bool started_ = false, stopping_ = false, draining_ = false, ended_ = false;
  std::thread thread_;
};

}  // namespace surogate::serve

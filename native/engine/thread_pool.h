// The host's threads. One caller at a time hands out numbered tasks; it and the workers claim them one after another.
//
// Each worker has a stretch of the tasks, which it goes through in order, so that what it asks memory for ahead of a task
// is what it reads next; whoever is through takes what is left of the others' stretches.
//
// Two things decide the design beside that, both about a machine that other processes use as well:
//   - a thread that waits spins for a few microseconds, enough for the next operator of a decoding step to arrive,
//     and then sleeps in the kernel, so that it never keeps a core from whoever could use it;
//   - the caller waits only for tasks that somebody has begun: a worker that the scheduler keeps away costs its share
//     of the speed and nothing more.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "error.h"
#include "surogate/abi.h"

namespace surogate {

class SUROGATE_API ThreadPool {
 public:
  // `num_workers` counts the calling thread; at least 1. Threads are started here and joined by the destructor.
  explicit ThreadPool(int32_t num_workers);
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;

  int32_t num_workers() const { return num_workers_; }

  // Runs body(context, task, worker) for every task in [0, num_tasks); the caller is worker 0. From inside a task it
  // runs everything on the spot. Not to be called by two threads at once.
  void parallel_for(int64_t num_tasks, sg_task_fn body, void *context);

 private:
  struct alignas(64) Padded {
    std::atomic<uint64_t> value{0};
  };
  struct alignas(64) Word {
    std::atomic<uint32_t> value{0};
  };

  void dispatch(int64_t first_task, uint32_t num_tasks, sg_task_fn body, void *context);
  void claim_and_run(int32_t worker);
  void run_stretch(int32_t stretch, int32_t worker);
  void work(int32_t worker);

  int32_t num_workers_;

  // The job on offer. Written by the caller while nothing is left to claim, read by workers before they claim: a claim
  // succeeds only within the generation whose job was read.
  std::atomic<sg_task_fn> body_{nullptr};
  std::atomic<void *> context_{nullptr};
  std::atomic<int64_t> first_task_{0};
  std::atomic<uint32_t> num_tasks_{0};

  int32_t num_stretches_;
  std::unique_ptr<Padded[]> tickets_;  // of each stretch: generation (upper 32 bits), tasks left to claim (lower 32)
  uint64_t generation_ = 0;
  Word finished_;        // tasks done in this generation
  Word caller_asleep_;
  Word epoch_;           // what idle workers wait on; odd once the pool is closing
  Word workers_asleep_;
  std::vector<std::thread> threads_;
};

}  // namespace surogate

// What the ABI calls a stream: on the CPU a share of the host's threads, on a device one of its own queues.
struct sg_stream {
  surogate::ThreadPool *pool = nullptr;
  void *native = nullptr;
};

#include "thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <string>

namespace surogate {
namespace {

// How long a thread looks before it sleeps. Idle workers bridge the gap between two operators; the caller bridges the
// tail of the last task.
constexpr uint64_t kSpinCycles = 12'000;  // of the time stamp counter: 4 to 6 microseconds
constexpr uint32_t kClosing = UINT32_MAX;
constexpr int32_t kMaxStretches = 16;  // a job writes a line of memory for each

thread_local bool inside_task = false;

void futex_wait(std::atomic<uint32_t> &word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t> &word, int count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// True as soon as the word differs from `seen`, false when the time for looking is over.
bool spin_until_changed(const std::atomic<uint32_t> &word, uint32_t seen) {
  const uint64_t start = __rdtsc();
  do {
    if (word.load(std::memory_order_acquire) != seen) return true;
    _mm_pause();
  } while (__rdtsc() - start < kSpinCycles);
  return false;
}

// Tasks before stretch `index` of `count`.
uint32_t stretch_begin(uint32_t num_tasks, int32_t index, int32_t count) {
  return static_cast<uint32_t>(uint64_t{num_tasks} * static_cast<uint32_t>(index) / static_cast<uint32_t>(count));
}

}  // namespace

ThreadPool::ThreadPool(int32_t num_workers) : num_workers_(num_workers) {
  if (num_workers < 1 || num_workers > 1024) {
    throw Error("a thread pool of " + std::to_string(num_workers) + " threads", "threads must be between 1 and 1024");
  }
  num_stretches_ = std::min(num_workers, kMaxStretches);
  tickets_ = std::make_unique<Padded[]>(static_cast<size_t>(num_stretches_));
  threads_.reserve(static_cast<size_t>(num_workers - 1));
  for (int32_t worker = 1; worker < num_workers; ++worker) {
    threads_.emplace_back([this, worker] { work(worker); });
  }
}

ThreadPool::~ThreadPool() {
  epoch_.value.store(kClosing, std::memory_order_seq_cst);
  futex_wake(epoch_.value, INT_MAX);
  for (std::thread &thread : threads_) thread.join();
}

void ThreadPool::parallel_for(int64_t num_tasks, sg_task_fn body, void *context) {
  if (num_tasks <= 1 || num_workers_ == 1 || inside_task) {
    for (int64_t task = 0; task < num_tasks; ++task) body(context, task, 0);
    return;
  }
  for (int64_t first = 0; first < num_tasks; first += INT32_MAX) {
    dispatch(first, static_cast<uint32_t>(std::min<int64_t>(num_tasks - first, INT32_MAX)), body, context);
  }
}

void ThreadPool::dispatch(int64_t first_task, uint32_t num_tasks, sg_task_fn body, void *context) {
  body_.store(body, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  first_task_.store(first_task, std::memory_order_relaxed);
  num_tasks_.store(num_tasks, std::memory_order_relaxed);
  finished_.value.store(0, std::memory_order_relaxed);
  ++generation_;
  for (int32_t i = 0; i < num_stretches_; ++i) {
    const uint32_t count = stretch_begin(num_tasks, i + 1, num_stretches_) - stretch_begin(num_tasks, i, num_stretches_);
    tickets_[i].value.store(generation_ << 32 | count, std::memory_order_release);
  }

  // The worker that goes to sleep announces it and then looks at the epoch; the caller changes the epoch and then looks
  // for sleepers. One of the two sees the other.
  uint32_t epoch = epoch_.value.load(std::memory_order_relaxed) + 1;
  epoch_.value.store(epoch == kClosing ? 0 : epoch, std::memory_order_seq_cst);
  const uint32_t asleep = workers_asleep_.value.load(std::memory_order_seq_cst);
  if (asleep > 0) futex_wake(epoch_.value, static_cast<int>(std::min<uint32_t>(asleep, num_tasks - 1)));

  claim_and_run(0);

  uint32_t done = finished_.value.load(std::memory_order_acquire);
  while (done != num_tasks) {
    if (!spin_until_changed(finished_.value, done)) {
      caller_asleep_.value.store(1, std::memory_order_seq_cst);
      done = finished_.value.load(std::memory_order_seq_cst);
      if (done != num_tasks) futex_wait(finished_.value, done);
      caller_asleep_.value.store(0, std::memory_order_relaxed);
    }
    done = finished_.value.load(std::memory_order_acquire);
  }
}

void ThreadPool::claim_and_run(int32_t worker) {
  inside_task = true;
  const int32_t own = worker % num_stretches_;
  for (int32_t i = 0; i < num_stretches_; ++i) run_stretch((own + i) % num_stretches_, worker);
  inside_task = false;
}

void ThreadPool::run_stretch(int32_t stretch, int32_t worker) {
  std::atomic<uint64_t> &tickets = tickets_[stretch].value;
  uint64_t ticket = tickets.load(std::memory_order_acquire);
  while (static_cast<uint32_t>(ticket) != 0) {
    const sg_task_fn body = body_.load(std::memory_order_relaxed);
    void *const context = context_.load(std::memory_order_relaxed);
    const int64_t first_task = first_task_.load(std::memory_order_relaxed);
    const uint32_t num_tasks = num_tasks_.load(std::memory_order_relaxed);
    const uint32_t left = static_cast<uint32_t>(ticket);
    if (!tickets.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      continue;
    }
    body(context, first_task + stretch_begin(num_tasks, stretch + 1, num_stretches_) - left, worker);
    // Counted one by one: the caller must not be held up by a worker that lost its core between two tasks.
    const uint32_t done = finished_.value.fetch_add(1, std::memory_order_seq_cst) + 1;
    if (worker != 0 && done == num_tasks && caller_asleep_.value.load(std::memory_order_seq_cst) != 0) {
      futex_wake(finished_.value, 1);
    }
    ticket = tickets.load(std::memory_order_acquire);
  }
}

void ThreadPool::work(int32_t worker) {
  uint32_t seen = 0;
  while (true) {
    if (!spin_until_changed(epoch_.value, seen)) {
      workers_asleep_.value.fetch_add(1, std::memory_order_seq_cst);
      futex_wait(epoch_.value, seen);
      workers_asleep_.value.fetch_sub(1, std::memory_order_relaxed);
    }
    const uint32_t epoch = epoch_.value.load(std::memory_order_acquire);
    if (epoch == kClosing) return;
    if (epoch == seen) continue;
    seen = epoch;
    claim_and_run(worker);
  }
}

}  // namespace surogate

// Where sessions run: a device, its streams, the host's threads, and the lock that one run at a time holds. Sessions that
// share a queue run in the order of their calls, and share the memory that none of them needs between two runs.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "device.h"
#include "error.h"
#include "memory.h"
#include "thread_pool.h"

namespace surogate {

class SUROGATE_API Queue {
 public:
  // threads: of the host, the caller of a run included. without_device: for looking at programs; nothing is made on the
  // device. Throws Error.
  Queue(const std::string &backend, int32_t device, int32_t threads, bool without_device = false);
  ~Queue();
  Queue(const Queue &) = delete;
  Queue &operator=(const Queue &) = delete;

  const std::shared_ptr<Device> &device() const { return device_; }
  int32_t threads() const { return pool_.num_workers(); }

  // Held while something runs here and while streams or shared memory are asked for.
  std::mutex &mutex() { return mutex_; }

  // Stream `index` as kernels see it; streams are made when they are first asked for, and stay where they are.
  sg_stream *handle(uint32_t index);
  // The device's stream behind it; not on the host. It was asked for by `handle` before.
  const Stream &stream(uint32_t index) const { return streams_[index]; }

  // Memory whose contents nobody needs from one run to the next: whoever asks under one name gets the same, if it is
  // large enough. If not, the name stands for a larger one from then on; those who have the smaller one keep it. So ask
  // for the most first.
  std::shared_ptr<const Memory> scratch(const std::string &name, size_t bytes);

  // Copies between the host and memory of the device, in stream 0's order; `write` has taken what it needs when it
  // returns, `read` has it all. The caller holds the mutex.
  void write(void *to, const void *from, uint64_t bytes);
  void read(void *to, const void *from, uint64_t bytes);

  void synchronize() const;     // waits for all streams; throws what they report
  void settle() const noexcept; // the same, whatever they report

 private:
  std::shared_ptr<Device> device_;
  bool without_device_;
  ThreadPool pool_;
  std::mutex mutex_;
  std::deque<Stream> streams_;  // none on the host
  std::deque<sg_stream> handles_;
  std::unordered_map<std::string, std::shared_ptr<const Memory>> scratch_;
};

}  // namespace surogate

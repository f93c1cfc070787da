// A program bound to a device: kernels chosen and prepared, memory allocated, external storages attached.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "call.h"
#include "device.h"
#include "error.h"
#include "memory.h"
#include "program.h"
#include "queue.h"
#include "registry.h"

namespace surogate {

struct SessionOptions {
  std::string backend = "cpu";
  int32_t device = 0;
  int32_t threads = 1;    // of the host, the thread that calls run included
  bool plan_only = false; // choose kernels and sizes, allocate and prepare nothing
  bool graphs = true;     // devices: record an entry at its second run, and launch the recording from then on
  bool batch_invariant = false;  // only kernels of trait ROW_INVARIANT: a token's bits are the same in every batch
};

class SUROGATE_API Session {
 public:
  // Verifies the program and chooses its kernels; throws Error. With a queue of its own, or on one that other sessions
  // use too: then backend, device and threads are the queue's. Sessions of one queue share the kernels' workspace, and
  // arenas of one name in which nothing is kept from one run to the next (no persistent storage and no input).
  Session(std::shared_ptr<const Program> program, const SessionOptions &options, std::shared_ptr<Queue> queue = nullptr);
  ~Session();
  Session(const Session &) = delete;
  Session &operator=(const Session &) = delete;

  // Attaches memory of the session's device to an external storage; it must stay valid until another takes its place or
  // the session ends.
  void bind(const std::string &storage, void *data, uint64_t bytes, bool writable);

  // A tensor as kernels see it. Throws Error for an unknown name and while its storage isn't bound.
  const sg_tensor &tensor(const std::string &name) const;
  const Tensor &tensor_record(const std::string &name) const;

  // Copies `bytes` bytes between the host and a dense tensor, from `offset` bytes past its beginning. On a device a write
  // takes its place behind what was run before, and a read waits for that.
  void write(const std::string &name, uint64_t offset, const void *from, uint64_t bytes);
  void read(const std::string &name, uint64_t offset, void *to, uint64_t bytes);

  // Runs an entry. On a device it only has begun when this returns: reads wait for it, as does `synchronize`. One run at
  // a time on a queue: a second thread waits for the first. Throws Error.
  void run(const std::string &entry);
  void synchronize();

  // Runs an entry and waits for it; the time of each instruction.
  std::vector<double> profile(const std::string &entry);

  const Program &program() const { return *program_; }
  const std::shared_ptr<Queue> &queue() const { return queue_; }
  const std::shared_ptr<Device> &device() const { return device_; }
  const Entry &entry(const std::string &name) const;
  const Choice &choice(size_t instruction) const { return steps_[instruction].choice; }
  std::string tuning(size_t instruction) const;  // what its kernel decided by measuring, or ""
  size_t workspace_bytes(size_t instruction) const { return steps_[instruction].kernel.workspace_bytes(); }
  size_t workspace_bytes() const;
  int32_t threads() const { return queue_->threads(); }
  // Why an entry is run instruction by instruction; "" where it is recorded.
  std::string why_not_recorded(const std::string &entry) const;

 private:
  struct Step {
    sg_call call;
    Choice choice;
    BoundKernel kernel;
    Step(sg_call call, Choice chosen)
        : call(call), choice(std::move(chosen)), kernel(choice.kernel, this->call) {}
  };

  uint32_t num_streams() const { return static_cast<uint32_t>(workspace_sizes_.size()); }
  void lay_out_tensors();
  void choose_kernels(uint32_t traits);
  void allocate();
  void prepare();
  void index_names();
  void check_bound(const Entry &entry) const;
  const sg_tensor &dense(const std::string &name, uint64_t offset, uint64_t bytes) const;
  size_t index_of(const Entry &entry) const { return static_cast<size_t>(&entry - program_->entries().data()); }
  void run_step(size_t instruction, const Entry &entry);
  template <class Around>
  void issue(const Entry &entry, Around &&around);
  template <class Around>
  void issue_now(const Entry &entry, Around &&around);
  void run_on_device(const Entry &entry);
  [[noreturn]] void fail(size_t instruction, const Entry &entry, const Error &error) const;

  std::shared_ptr<const Program> program_;
  std::shared_ptr<Queue> queue_;  // outlives the calls that name its streams and the graphs that run on them
  std::shared_ptr<Device> device_;
  bool graphs_enabled_;
  bool prepared_ = false;
  char error_[kErrorSize] = "";

  std::vector<std::shared_ptr<const Memory>> arenas_;
  std::vector<std::shared_ptr<const Memory>> workspaces_;  // for each stream
  std::vector<size_t> workspace_sizes_;           // for each stream
  std::vector<sg_tensor> tensors_;                // parallel to the program's
  std::vector<std::vector<size_t>> tensors_of_;   // for each storage: its tensors
  std::vector<bool> bound_;                       // for each storage
  std::vector<bool> written_;                     // for each storage: some instruction writes it
  std::vector<std::vector<size_t>> externals_;    // for each entry: the external storages that it uses
  std::vector<const sg_tensor *> operands_;       // what the calls' operand lists point into
  std::unordered_map<std::string, size_t> storage_index_, tensor_index_, entry_index_;
  std::atomic<bool> running_{false};

  std::deque<Step> steps_;                        // a deque: calls are pointed at and must not move
  std::unordered_map<size_t, Event> signals_;     // instructions that another stream waits for
  std::vector<Event> joins_;                      // for each stream: begin of an entry (0), or its end on that stream
  std::vector<bool> ran_;                         // for each entry
  std::vector<std::unique_ptr<Graph>> graphs_;    // for each entry, once recorded
};

}  // namespace surogate

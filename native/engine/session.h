// A program bound to a device: kernels chosen and prepared, memory allocated, external storages attached.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "call.h"
#include "error.h"
#include "memory.h"
#include "program.h"
#include "registry.h"
#include "thread_pool.h"

namespace surogate {

class SUROGATE_API Session {
 public:
  enum class Mode { kRun, kPlan };  // kPlan: choose kernels and sizes, allocate and prepare nothing

  // Verifies the program and chooses its kernels; throws Error. `threads` counts the thread that calls run.
  Session(std::shared_ptr<const Program> program, const std::string &backend, int32_t threads, Mode mode);
  ~Session();
  Session(const Session &) = delete;
  Session &operator=(const Session &) = delete;

  // Attaches memory to an external storage; it must stay valid until another takes its place or the session ends.
  void bind(const std::string &storage, void *data, uint64_t bytes, bool writable);

  // A tensor as kernels see it. Throws Error for an unknown name and while its storage isn't bound.
  const sg_tensor &tensor(const std::string &name) const;
  const Tensor &tensor_record(const std::string &name) const;

  // Runs an entry; seconds[i], if asked for, receives the time of its i-th instruction. One run at a time: a second
  // thread waits for the first. Throws Error.
  void run(const std::string &entry, std::vector<double> *seconds = nullptr);

  const Program &program() const { return *program_; }
  const Entry &entry(const std::string &name) const;
  const Choice &choice(size_t instruction) const { return steps_[instruction].choice; }
  size_t workspace_bytes(size_t instruction) const { return steps_[instruction].kernel.workspace_bytes(); }
  size_t workspace_bytes() const { return workspace_bytes_; }
  int32_t threads() const { return pool_.num_workers(); }

 private:
  struct Step {
    sg_call call;
    Choice choice;
    BoundKernel kernel;
    Step(sg_call call, Choice chosen)
        : call(call), choice(std::move(chosen)), kernel(choice.kernel, this->call) {}
  };

  void lay_out_tensors();
  void choose_kernels(const std::string &backend);
  void allocate();
  void prepare();
  void index_names();
  void check_bound(const Entry &entry) const;
  [[noreturn]] void fail(size_t instruction, const Entry &entry, const Error &error) const;

  std::shared_ptr<const Program> program_;
  ThreadPool pool_;
  sg_stream stream_;
  char error_[kErrorSize] = "";

  std::vector<Memory> arenas_;
  Memory workspace_;
  size_t workspace_bytes_ = 0;
  std::vector<sg_tensor> tensors_;                // parallel to the program's
  std::vector<std::vector<size_t>> tensors_of_;   // for each storage: its tensors
  std::vector<bool> bound_;                       // for each storage
  std::vector<bool> written_;                     // for each storage: some instruction writes it
  std::vector<std::vector<size_t>> externals_;    // for each entry: the external storages that it uses
  std::vector<const sg_tensor *> operands_;       // what the calls' operand lists point into
  std::deque<Step> steps_;                        // a deque: calls are pointed at and must not move
  std::unordered_map<std::string, size_t> storage_index_, tensor_index_, entry_index_;
  std::mutex mutex_;                              // held while an entry runs and while memory is attached
};

}  // namespace surogate

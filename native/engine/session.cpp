#include "session.h"

#include <algorithm>
#include <chrono>

#include "dtype.h"
#include "verify.h"

namespace surogate {
namespace {

// The place of a tensor that has no memory yet. Kernels compare it with NULL and do nothing else.
void *const kUnbound = reinterpret_cast<void *>(uintptr_t{64});

constexpr uint32_t kDeviceStreams = 8;  // more than any program has had a use for

const sg_tensor kAbsent = {sizeof(sg_tensor), nullptr, 0, 0, {}, {}, 0, 0};

template <class Map>
size_t look_up(const Map &map, const std::string &name, const char *what) {
  auto found = map.find(name);
  if (found != map.end()) return found->second;
  std::vector<std::string> names;
  for (const auto &[known, index] : map) names.push_back(known);
  std::sort(names.begin(), names.end());
  std::string list;
  for (size_t i = 0; i < names.size() && i < 20; ++i) list += (i > 0 ? ", " : "") + names[i];
  if (names.size() > 20) list += ", ... (" + std::to_string(names.size()) + " in all)";
  throw Error("the program has no " + std::string(what) + " '" + name + "'", "it has: " + list);
}

// The queue's lock, while a session runs there.
class Running {
 public:
  Running(Queue &queue, std::atomic<bool> &running) : lock_(queue.mutex()), running_(running) { running_ = true; }
  ~Running() { running_ = false; }
  Running(const Running &) = delete;
  Running &operator=(const Running &) = delete;

 private:
  std::lock_guard<std::mutex> lock_;
  std::atomic<bool> &running_;
};

}  // namespace

Session::Session(std::shared_ptr<const Program> program, const SessionOptions &options, std::shared_ptr<Queue> queue)
    : program_(std::move(program)),
      queue_(queue != nullptr ? std::move(queue)
                              : std::make_shared<Queue>(options.backend, options.device, options.threads, options.plan_only)),
      device_(queue_->device()),
      graphs_enabled_(options.graphs) {
  verify(*program_, device_->is_host() ? 1 : kDeviceStreams);
  device_->activate();
  index_names();
  lay_out_tensors();
  uint32_t count = 1;
  for (const Instruction &instruction : program_->instructions()) count = std::max(count, instruction.stream + 1);
  workspace_sizes_.resize(count);
  std::lock_guard lock(queue_->mutex());  // streams and scratch memory are asked for, and preparing may use the threads
  choose_kernels(options.batch_invariant ? uint32_t{SG_TRAIT_ROW_INVARIANT} : 0);
  if (options.plan_only) return;
  prepare();  // first: what it measures may take memory for a while, as much of it whatever the arenas need
  allocate();
  if (device_->is_host()) return;
  for (const Instruction &instruction : program_->instructions()) {
    for (int32_t waited : instruction.waits) signals_.try_emplace(static_cast<size_t>(waited), device_, false);
  }
  for (uint32_t i = 0; i < count; ++i) joins_.emplace_back(device_, false);
  ran_.resize(program_->entries().size());
  graphs_.resize(program_->entries().size());
}

// What is on the streams uses the memory that goes.
Session::~Session() { queue_->settle(); }

void Session::index_names() {
  for (size_t i = 0; i < program_->storages().size(); ++i) storage_index_[program_->storages()[i].name] = i;
  for (size_t i = 0; i < program_->tensors().size(); ++i) tensor_index_[program_->tensors()[i].name] = i;
  for (size_t i = 0; i < program_->entries().size(); ++i) entry_index_[program_->entries()[i].name] = i;
}

void Session::lay_out_tensors() {
  const size_t num_storages = program_->storages().size();
  tensors_of_.resize(num_storages);
  bound_.assign(num_storages, false);
  written_.assign(num_storages, false);
  for (const Tensor &tensor : program_->tensors()) {
    tensors_of_[static_cast<size_t>(tensor.storage)].push_back(tensors_.size());
    tensors_.push_back(tensor.layout);
    tensors_.back().data = kUnbound;
    if ((program_->storage_of(tensor).flags & Storage::kFixed) != 0) tensors_.back().flags |= SG_TENSOR_FIXED;
  }
  auto storage_of = [&](int32_t tensor) {
    return static_cast<size_t>(program_->tensors()[static_cast<size_t>(tensor)].storage);
  };
  for (const Instruction &instruction : program_->instructions()) {
    for (int32_t index : instruction.outputs) {
      if (index >= 0) written_[storage_of(index)] = true;
    }
  }
  for (const Entry &entry : program_->entries()) {
    std::vector<bool> used(num_storages);
    for (uint32_t i = entry.first; i < entry.first + entry.count; ++i) {
      const Instruction &instruction = program_->instructions()[i];
      for (std::span<const int32_t> side : {instruction.inputs, instruction.outputs}) {
        for (int32_t index : side) {
          if (index >= 0) used[storage_of(index)] = true;
        }
      }
    }
    std::vector<size_t> &externals = externals_.emplace_back();
    for (size_t s = 0; s < num_storages; ++s) {
      if (used[s] && program_->storages()[s].external()) externals.push_back(s);
    }
  }
}

void Session::choose_kernels(uint32_t traits) {
  size_t num_operands = 0;
  for (const Instruction &i : program_->instructions()) num_operands += i.inputs.size() + i.outputs.size();
  operands_.reserve(num_operands);
  for (size_t i = 0; i < program_->instructions().size(); ++i) {
    const Instruction &instruction = program_->instructions()[i];
    const size_t first = operands_.size();
    for (std::span<const int32_t> side : {instruction.inputs, instruction.outputs}) {
      for (int32_t index : side) operands_.push_back(index < 0 ? &kAbsent : &tensors_[static_cast<size_t>(index)]);
    }
    const std::span<const sg_tensor *const> operands(operands_.data() + first, operands_.size() - first);
    sg_call call = make_call(instruction.op, queue_->handle(instruction.stream), operands.first(instruction.inputs.size()),
                             operands.subspan(instruction.inputs.size()), instruction.attrs, error_);
    Choice choice;
    try {
      choice = Registry::global().select(call, device_->backend(), instruction.kernel, traits);
    } catch (const Error &error) {
      program_->fail(i, error.message, error.hint);
    }
    verify_overlap(*program_, i, choice.kernel->table);
    const Step &step = steps_.emplace_back(call, std::move(choice));
    size_t &workspace = workspace_sizes_[instruction.stream];
    workspace = std::max(workspace, step.kernel.workspace_bytes());
  }
}

void Session::allocate() {
  std::vector<bool> kept(program_->arenas().size());
  for (const Storage &storage : program_->storages()) {
    if (!storage.external() && storage.always_live()) kept[static_cast<size_t>(storage.arena)] = true;
  }
  for (size_t a = 0; a < kept.size(); ++a) {
    const Arena &arena = program_->arenas()[a];
    const std::string what = "arena '" + std::string(arena.name) + "'";
    arenas_.push_back(kept[a] ? std::make_shared<const Memory>(device_, arena.bytes, what)
                              : queue_->scratch(what, arena.bytes));
  }
  for (size_t s = 0; s < workspace_sizes_.size(); ++s) {
    workspaces_.push_back(queue_->scratch("the kernels' workspace on stream " + std::to_string(s), workspace_sizes_[s]));
  }
  for (size_t i = 0; i < steps_.size(); ++i) {
    steps_[i].call.workspace = workspaces_[program_->instructions()[i].stream]->data();
    steps_[i].call.workspace_size = steps_[i].kernel.workspace_bytes();
  }
  for (size_t t = 0; t < tensors_.size(); ++t) {
    const Tensor &tensor = program_->tensors()[t];
    const Storage &storage = program_->storage_of(tensor);
    if (storage.external()) continue;
    char *base = static_cast<char *>(arenas_[static_cast<size_t>(storage.arena)]->data());
    if (base != nullptr) tensors_[t].data = base + storage.offset + tensor.byte_offset;
    bound_[static_cast<size_t>(tensor.storage)] = true;
  }
}

void Session::prepare() {
  for (size_t i = 0; i < steps_.size(); ++i) {
    try {
      steps_[i].kernel.prepare();
    } catch (const Error &error) {
      program_->fail(i, error.message, error.hint);
    }
  }
  prepared_ = true;
}

void Session::bind(const std::string &name, void *data, uint64_t bytes, bool writable) {
  const size_t index = look_up(storage_index_, name, "storage");
  const Storage &storage = program_->storages()[index];
  const std::string where = "storage '" + name + "'";
  if (!storage.external()) throw Error(where + " lies in an arena", "write to its tensors instead of binding it");
  if (bytes != storage.bytes) {
    throw Error(where + " takes " + std::to_string(storage.bytes) + " bytes, the buffer has " + std::to_string(bytes));
  }
  if (written_[index] && !writable) throw Error(where + " is written by the program, the buffer is read-only");
  for (size_t t : tensors_of_[index]) {
    const Tensor &tensor = program_->tensors()[t];
    const uint64_t unit = is_block_dtype(tensor.layout.dtype) ? 2 : dtype_info(tensor.layout.dtype)->block_bytes;
    if ((reinterpret_cast<uintptr_t>(data) + tensor.byte_offset) % unit != 0) {
      throw Error(where + ": the buffer isn't aligned to the elements of tensor '" + tensor.name + "'",
                  "copy it to memory that is aligned to " + std::to_string(unit) + " bytes");
    }
  }
  if (running_) throw Error(where + " can't be bound while the session runs");
  std::lock_guard lock(queue_->mutex());
  for (size_t t : tensors_of_[index]) {
    if (bytes > 0) tensors_[t].data = static_cast<char *>(data) + program_->tensors()[t].byte_offset;
  }
  bound_[index] = true;
  for (std::unique_ptr<Graph> &graph : graphs_) graph.reset();  // they name the memory that was attached before
}

const Tensor &Session::tensor_record(const std::string &name) const {
  return program_->tensors()[look_up(tensor_index_, name, "tensor")];
}

const sg_tensor &Session::tensor(const std::string &name) const {
  const size_t index = look_up(tensor_index_, name, "tensor");
  const Tensor &record = program_->tensors()[index];
  if (!bound_[static_cast<size_t>(record.storage)]) {
    throw Error("tensor '" + name + "' has no memory yet",
                "bind its storage '" + std::string(program_->storage_of(record).name) + "' first");
  }
  return tensors_[index];
}

const Entry &Session::entry(const std::string &name) const {
  return program_->entries()[look_up(entry_index_, name, "entry")];
}

size_t Session::workspace_bytes() const {
  size_t total = 0;
  for (size_t bytes : workspace_sizes_) total += bytes;
  return total;
}

std::string Session::tuning(size_t instruction) const {
  const Step &step = steps_[instruction];
  char text[4096] = "";
  if (!prepared_ || step.choice.kernel->table.tuning == nullptr ||
      step.choice.kernel->table.tuning(&step.call, text, sizeof(text)) != SG_OK) {
    return "";
  }
  text[sizeof(text) - 1] = '\0';
  return text;
}

const sg_tensor &Session::dense(const std::string &name, uint64_t offset, uint64_t bytes) const {
  const sg_tensor &layout = tensor(name);
  const Tensor &record = tensor_record(name);
  int64_t expected = 1;
  for (int32_t axis = layout.rank - 1; axis >= 0; --axis) {
    if (layout.shape[axis] != 1 && layout.strides[axis] != expected) {
      throw Error("tensor '" + name + "' is not dense", "copy the tensor that it is a part of");
    }
    expected *= layout.shape[axis];
  }
  if (offset > record.bytes || bytes > record.bytes - offset) {
    throw Error("tensor '" + name + "' has " + std::to_string(record.bytes) + " bytes; " + std::to_string(bytes) +
                " from byte " + std::to_string(offset) + " on reach past its end");
  }
  return layout;
}

void Session::write(const std::string &name, uint64_t offset, const void *from, uint64_t bytes) {
  std::lock_guard lock(queue_->mutex());
  queue_->write(static_cast<char *>(dense(name, offset, bytes).data) + offset, from, bytes);
}

void Session::read(const std::string &name, uint64_t offset, void *to, uint64_t bytes) {
  std::lock_guard lock(queue_->mutex());
  queue_->read(to, static_cast<const char *>(dense(name, offset, bytes).data) + offset, bytes);
}

void Session::synchronize() {
  queue_->synchronize();
}

void Session::check_bound(const Entry &entry) const {
  const size_t index = index_of(entry);
  for (size_t s : externals_[index]) {
    if (!bound_[s]) {
      throw Error("entry '" + std::string(entry.name) + "' uses storage '" + program_->storages()[s].name +
                      "', which isn't bound",
                  "bind every external storage before running");
    }
  }
}

void Session::fail(size_t index, const Entry &entry, const Error &error) const {
  program_->fail(index, "in entry '" + std::string(entry.name) + "': " + error.message, error.hint);
}

void Session::run_step(size_t index, const Entry &entry) {
  Step &step = steps_[index];
  if (step.choice.kernel->table.run(&step.call) == SG_OK) return;
  try {
    throw_kernel_error(*step.choice.kernel, step.call, "run");
  } catch (const Error &error) {
    fail(index, entry, error);
  }
}

// Runs an entry's instructions one by one. Where one fails the streams are not joined: what comes next would not follow
// what is on the others, so that is waited for.
template <class Around>
void Session::issue_now(const Entry &entry, Around &&around) {
  try {
    issue(entry, around);
  } catch (...) {
    queue_->settle();
    throw;
  }
}

// Puts an entry's instructions on their streams. Work that comes later on stream 0 follows all of it, and all of it
// follows what was on stream 0 before. around(i, run) runs instruction i.
template <class Around>
void Session::issue(const Entry &entry, Around &&around) {
  std::vector<bool> used(num_streams());
  if (num_streams() > 1) joins_[0].record(queue_->stream(0));
  for (size_t i = entry.first; i < size_t{entry.first} + entry.count; ++i) {
    const Instruction &instruction = program_->instructions()[i];
    const Stream &stream = queue_->stream(instruction.stream);
    if (instruction.stream != 0 && !used[instruction.stream]) {
      used[instruction.stream] = true;
      joins_[0].wait(stream);
    }
    for (int32_t waited : instruction.waits) signals_.at(static_cast<size_t>(waited)).wait(stream);
    around(i, [&] { run_step(i, entry); });
    if (const auto signal = signals_.find(i); signal != signals_.end()) signal->second.record(stream);
  }
  for (uint32_t s = 1; s < num_streams(); ++s) {
    if (!used[s]) continue;
    joins_[s].record(queue_->stream(s));
    joins_[s].wait(queue_->stream(0));
  }
}

std::string Session::why_not_recorded(const std::string &name) const {
  if (device_->is_host()) return "the host runs kernels as functions";
  if (!graphs_enabled_) return "graphs are switched off";
  const Entry &wanted = entry(name);
  for (size_t i = wanted.first; i < size_t{wanted.first} + wanted.count; ++i) {
    const sg_kernel &kernel = steps_[i].choice.kernel->table;
    if ((kernel.traits & SG_TRAIT_CAPTURABLE) == 0) {
      return "instruction " + std::to_string(i) + " (" + kernel.op + ") runs kernel '" + kernel.name +
             "', which cannot be recorded";
    }
  }
  return "";
}

// The first run is not recorded: libraries load code and take memory when they are used first.
void Session::run_on_device(const Entry &entry) {
  const size_t index = index_of(entry);
  device_->activate();
  if (graphs_[index] == nullptr && ran_[index] && why_not_recorded(entry.name).empty()) {
    const auto issue_all = [&] { issue(entry, [](size_t, auto &&run) { run(); }); };
    graphs_[index] = std::make_unique<Graph>(device_, queue_->stream(0), issue_all);
  }
  if (graphs_[index] != nullptr) {
    graphs_[index]->launch(queue_->stream(0));
  } else {
    issue_now(entry, [](size_t, auto &&run) { run(); });
  }
  ran_[index] = true;
}

void Session::run(const std::string &name) {
  const Entry &wanted = entry(name);
  const Running running(*queue_, running_);
  check_bound(wanted);
  error_[0] = '\0';
  if (!device_->is_host()) return run_on_device(wanted);
  for (size_t i = wanted.first; i < size_t{wanted.first} + wanted.count; ++i) run_step(i, wanted);
}

// On a device everything is recorded first: put on the stream one by one, small kernels would wait for the host, and the
// times be the host's.
std::vector<double> Session::profile(const std::string &name) {
  using Clock = std::chrono::steady_clock;
  const Entry &wanted = entry(name);
  const Running running(*queue_, running_);
  check_bound(wanted);
  error_[0] = '\0';
  std::vector<double> seconds;
  if (device_->is_host()) {
    for (size_t i = wanted.first; i < size_t{wanted.first} + wanted.count; ++i) {
      const auto start = Clock::now();
      run_step(i, wanted);
      seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    return seconds;
  }
  device_->activate();
  const size_t index = index_of(wanted);
  if (!ran_[index]) {
    issue_now(wanted, [](size_t, auto &&run) { run(); });
    ran_[index] = true;
  }
  std::vector<Event> begins, ends;
  for (uint32_t i = 0; i < wanted.count; ++i) {
    begins.emplace_back(device_, true);
    ends.emplace_back(device_, true);
  }
  const auto timed = [&](size_t i, auto &&run) {
    const Stream &stream = queue_->stream(program_->instructions()[i].stream);
    begins[i - wanted.first].record(stream, true);
    run();
    ends[i - wanted.first].record(stream, true);
  };
  if (why_not_recorded(name).empty()) {
    const Graph graph(device_, queue_->stream(0), [&] { issue(wanted, timed); });
    graph.launch(queue_->stream(0));
    device_->synchronize(queue_->stream(0).native());
  } else {
    issue_now(wanted, timed);
    device_->synchronize(queue_->stream(0).native());
  }
  for (uint32_t i = 0; i < wanted.count; ++i) seconds.push_back(ends[i].seconds_since(begins[i]));
  return seconds;
}

}  // namespace surogate

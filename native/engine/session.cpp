#include "session.h"

#include <algorithm>
#include <chrono>

#include "dtype.h"
#include "verify.h"

namespace surogate {
namespace {

// The place of a tensor that has no memory yet. Kernels compare it with NULL and do nothing else.
void *const kUnbound = reinterpret_cast<void *>(uintptr_t{64});

constexpr uint32_t kCpuStreams = 1;

const sg_tensor kAbsent = {sizeof(sg_tensor), nullptr, 0, 0, {}, {}};

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

}  // namespace

Session::Session(std::shared_ptr<const Program> program, const std::string &backend, int32_t threads, Mode mode)
    : program_(std::move(program)), pool_(threads), stream_{&pool_} {
  if (backend != "cpu") throw Error("no device for backend '" + backend + "'", "available backends: cpu");
  verify(*program_, kCpuStreams);
  index_names();
  lay_out_tensors();
  choose_kernels(backend);
  if (mode == Mode::kPlan) return;
  allocate();
  prepare();
}

Session::~Session() = default;

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

void Session::choose_kernels(const std::string &backend) {
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
    sg_call call = make_call(instruction.op, &stream_, operands.first(instruction.inputs.size()),
                             operands.subspan(instruction.inputs.size()), instruction.attrs, error_);
    Choice choice;
    try {
      choice = Registry::global().select(call, backend, instruction.kernel);
    } catch (const Error &error) {
      program_->fail(i, error.message, error.hint);
    }
    verify_overlap(*program_, i, choice.kernel->table);
    const Step &step = steps_.emplace_back(call, std::move(choice));
    workspace_bytes_ = std::max(workspace_bytes_, step.kernel.workspace_bytes());
  }
}

void Session::allocate() {
  for (const Arena &arena : program_->arenas()) {
    arenas_.emplace_back(arena.bytes, "arena '" + std::string(arena.name) + "'");
  }
  workspace_ = Memory(workspace_bytes_, "the kernels' workspace");
  for (Step &step : steps_) {
    step.call.workspace = workspace_.data();
    step.call.workspace_size = step.kernel.workspace_bytes();
  }
  for (size_t t = 0; t < tensors_.size(); ++t) {
    const Tensor &tensor = program_->tensors()[t];
    const Storage &storage = program_->storage_of(tensor);
    if (storage.external()) continue;
    char *base = static_cast<char *>(arenas_[static_cast<size_t>(storage.arena)].data());
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
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) throw Error(where + " can't be bound while the session runs");
  for (size_t t : tensors_of_[index]) {
    if (bytes > 0) tensors_[t].data = static_cast<char *>(data) + program_->tensors()[t].byte_offset;
  }
  bound_[index] = true;
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

void Session::check_bound(const Entry &entry) const {
  const size_t index = static_cast<size_t>(&entry - program_->entries().data());
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

void Session::run(const std::string &name, std::vector<double> *seconds) {
  using Clock = std::chrono::steady_clock;
  const Entry &wanted = entry(name);
  std::lock_guard lock(mutex_);
  check_bound(wanted);
  error_[0] = '\0';
  const size_t end = size_t{wanted.first} + wanted.count;
  for (size_t i = wanted.first; i < end; ++i) {
    const auto start = seconds != nullptr ? Clock::now() : Clock::time_point{};
    Step &step = steps_[i];
    if (step.choice.kernel->table.run(&step.call) != SG_OK) {
      try {
        throw_kernel_error(*step.choice.kernel, step.call, "run");
      } catch (const Error &error) {
        fail(i, wanted, error);
      }
    }
    if (seconds != nullptr) seconds->push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
}

}  // namespace surogate

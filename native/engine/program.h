// A program: flat instructions over tensors, which lie in storages, which lie in arenas or belong to the caller.
//
// The file is little endian: a header, then eight tables, each found through (offset, count) in the header. Records are
// the `File...` structs of program.cpp. Names are offsets into a blob of NUL-terminated strings; offset 0 is "".
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "surogate/abi.h"

namespace surogate {

constexpr uint32_t kProgramFormatVersion = 1;

struct Arena {
  const char *name = "";
  uint64_t bytes = 0;
  uint64_t alignment = 0;
};

struct Storage {
  static constexpr uint32_t kPersistent = 1;  // keeps its contents from one run to the next
  static constexpr uint32_t kInput = 2;       // written by the host before a run
  static constexpr uint32_t kFixed = 4;       // nothing writes it while programs run

  const char *name = "";
  int32_t arena = -1;  // -1: external, bound by the caller
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t flags = 0;

  bool external() const { return arena < 0; }
  bool always_live() const { return (flags & (kPersistent | kInput)) != 0; }
};

struct Tensor {
  const char *name = "";
  int32_t storage = 0;
  uint64_t byte_offset = 0;
  uint64_t bytes = 0;   // from its first to past its last element
  sg_tensor layout{};   // data is NULL
};

struct Instruction {
  const char *op = "";
  const char *kernel = "";  // the kernel asked for; empty: the best score
  std::span<const int32_t> inputs;   // tensor indices, -1: absent
  std::span<const int32_t> outputs;
  std::span<const sg_attr> attrs;    // sorted by name
  uint32_t stream = 0;
  std::span<const int32_t> waits;    // indices of earlier instructions
};

struct Entry {
  const char *name = "";
  uint32_t first = 0;
  uint32_t count = 0;
};

class SUROGATE_API Program {
 public:
  // Reads a program file held in memory (it is copied). Every offset, count, index and name is checked; throws Error.
  // What the instructions do with the tensors is verify.h's business.
  explicit Program(std::span<const unsigned char> bytes);
  Program(const Program &) = delete;
  Program &operator=(const Program &) = delete;

  std::span<const unsigned char> fingerprint() const { return fingerprint_; }
  const std::vector<Arena> &arenas() const { return arenas_; }
  const std::vector<Storage> &storages() const { return storages_; }
  const std::vector<Tensor> &tensors() const { return tensors_; }
  const std::vector<Instruction> &instructions() const { return instructions_; }
  const std::vector<Entry> &entries() const { return entries_; }

  const Storage &storage_of(const Tensor &tensor) const { return storages_[static_cast<size_t>(tensor.storage)]; }
  // One line an operand of an instruction: "input 0 x: bf16[4, 576]".
  std::vector<std::string> describe(const Instruction &instruction) const;
  // Throws `message` about instruction `index`, with its operands.
  [[noreturn]] void fail(size_t index, const std::string &message, const std::string &hint = {}) const;

 private:
  friend class ProgramReader;

  unsigned char fingerprint_[32] = {};
  std::vector<char> strings_;
  std::vector<int32_t> operands_;
  std::vector<sg_attr> attrs_;
  std::vector<Arena> arenas_;
  std::vector<Storage> storages_;
  std::vector<Tensor> tensors_;
  std::vector<Instruction> instructions_;
  std::vector<Entry> entries_;
};

}  // namespace surogate

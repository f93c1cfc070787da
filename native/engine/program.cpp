#include "program.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_set>

#include "tensor.h"

namespace surogate {

static_assert(std::endian::native == std::endian::little, "program files are read as they lie in memory");

namespace {

constexpr char kMagic[8] = {'S', 'G', 'P', 'R', 'O', 'G', 'R', 'M'};

struct FileSection {
  uint64_t offset, count;
};
struct FileHeader {
  char magic[8];
  uint32_t format_version, abi_major, abi_minor, reserved;
  unsigned char fingerprint[32];
  FileSection strings, arenas, storages, tensors, instructions, operands, attrs, entries;
};
struct FileArena {
  uint32_t name, reserved;
  uint64_t bytes, alignment;
};
struct FileStorage {
  uint32_t name;
  int32_t arena;
  uint64_t offset, bytes;
  uint32_t flags, reserved;
};
struct FileTensor {
  uint32_t name;
  int32_t storage;
  uint64_t byte_offset;
  int32_t dtype, rank;
  int64_t shape[SG_MAX_RANK], strides[SG_MAX_RANK];
};
struct FileInstruction {
  uint32_t op, kernel, first_operand;
  uint16_t num_inputs, num_outputs;
  uint32_t first_attr, num_attrs, stream, first_wait, num_waits, reserved;
};
struct FileAttr {
  uint32_t name;
  int32_t kind;
  int64_t i;
  double f;
  uint32_t s, reserved;
};
struct FileEntry {
  uint32_t name, first_instruction, num_instructions, reserved;
};
static_assert(sizeof(FileHeader) == 184 && sizeof(FileArena) == 24 && sizeof(FileStorage) == 32);
static_assert(sizeof(FileTensor) == 120 && sizeof(FileInstruction) == 40);
static_assert(sizeof(FileAttr) == 32 && sizeof(FileEntry) == 16);

// Well-formed enough to be decoded by anybody: no stray or missing continuation bytes, nothing overlong, no surrogates.
bool is_utf8(const std::vector<char> &text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t at) { return at < text.size() ? static_cast<unsigned char>(text[at]) : 0u; };
    const unsigned lead = byte(i);
    if ((lead >= 0x80 && lead < 0xC2) || lead > 0xF4) return false;
    const size_t length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    uint32_t code = length == 1 ? lead : lead & (0xFFu >> (length + 1));
    for (size_t k = 1; k < length; ++k) {
      if ((byte(i + k) & 0xC0) != 0x80) return false;
      code = code << 6 | (byte(i + k) & 0x3F);
    }
    constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
    if (code < kSmallest[length] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return false;
    i += length;
  }
  return true;
}

std::string number(const char *what, size_t index) { return std::string(what) + " " + std::to_string(index); }

}  // namespace

class ProgramReader {
 public:
  ProgramReader(std::span<const unsigned char> bytes, Program &program) : bytes_(bytes), program_(program) {}

  void read() {
    read_header();
    read_strings();
    read_arenas();
    read_storages();
    read_tensors();
    program_.operands_ = table<int32_t>(header_.operands, "operands");
    read_attrs();
    read_instructions();
    read_entries();
  }

 private:
  [[noreturn]] static void damaged(const std::string &what) {
    throw Error("damaged program: " + what, "write the program again");
  }

  void read_header() {
    if (bytes_.size() < sizeof(header_)) damaged("it is shorter than its header");
    std::memcpy(&header_, bytes_.data(), sizeof(header_));
    if (std::memcmp(header_.magic, kMagic, sizeof(kMagic)) != 0) {
      throw Error("not a program: it doesn't begin with SGPROGRM");
    }
    if (header_.format_version != kProgramFormatVersion) {
      throw Error("the program has format version " + std::to_string(header_.format_version) + ", this engine reads " +
                      std::to_string(kProgramFormatVersion),
                  "write the program again with this release");
    }
    if (header_.abi_major != SG_ABI_MAJOR) {
      throw Error("the program was written for kernel ABI " + std::to_string(header_.abi_major) + "." +
                      std::to_string(header_.abi_minor) + ", this engine speaks " + std::to_string(SG_ABI_MAJOR) + "." +
                      std::to_string(SG_ABI_MINOR),
                  "write the program again with this release");
    }
    if (header_.reserved != 0) damaged("a reserved field of the header is set");
    std::memcpy(program_.fingerprint_, header_.fingerprint, sizeof(header_.fingerprint));
  }

  template <class Record>
  std::vector<Record> table(const FileSection &section, const char *what) const {
    const uint64_t size = bytes_.size();
    if (section.offset > size || section.count > (size - section.offset) / sizeof(Record)) {
      damaged("the table of " + std::string(what) + " (" + std::to_string(section.count) + " at byte " +
              std::to_string(section.offset) + ") doesn't fit into " + std::to_string(size) + " bytes");
    }
    if (section.count > INT32_MAX) damaged("the table of " + std::string(what) + " is too long");
    std::vector<Record> records(section.count);
    if (section.count > 0) std::memcpy(records.data(), bytes_.data() + section.offset, section.count * sizeof(Record));
    return records;
  }

  void read_strings() {
    program_.strings_ = table<char>(header_.strings, "strings");
    const std::vector<char> &blob = program_.strings_;
    if (blob.empty() || blob.front() != '\0' || blob.back() != '\0') {
      damaged("the strings don't begin and end with NUL");
    }
    if (!is_utf8(blob)) damaged("the strings aren't UTF-8");
  }

  const char *text(uint32_t offset, const std::string &where) const {
    if (offset >= program_.strings_.size()) damaged("the name of " + where + " lies outside the strings");
    return program_.strings_.data() + offset;
  }

  // A name that is looked up must be there, once.
  const char *unique(uint32_t offset, const std::string &where, std::unordered_set<std::string_view> &seen) const {
    const char *name = text(offset, where);
    if (name[0] == '\0') damaged(where + " has no name");
    if (!seen.insert(name).second) damaged(where + " has the name '" + name + "', which another has already");
    return name;
  }

  template <class T>
  std::span<const T> slice(const std::vector<T> &pool, uint64_t first, uint64_t count, const std::string &what) const {
    if (first > pool.size() || count > pool.size() - first) damaged(what + " lie outside their table");
    return {pool.data() + first, count};
  }

  void read_arenas() {
    std::unordered_set<std::string_view> seen;
    for (const FileArena &record : table<FileArena>(header_.arenas, "arenas")) {
      const std::string where = number("arena", program_.arenas_.size());
      program_.arenas_.push_back({unique(record.name, where, seen), record.bytes, record.alignment});
    }
  }

  void read_storages() {
    std::unordered_set<std::string_view> seen;
    for (const FileStorage &record : table<FileStorage>(header_.storages, "storages")) {
      const std::string where = number("storage", program_.storages_.size());
      if (record.arena < -1 || record.arena >= static_cast<int64_t>(program_.arenas_.size())) {
        damaged(where + " names arena " + std::to_string(record.arena) + ", which isn't there");
      }
      constexpr uint32_t kKnown = Storage::kPersistent | Storage::kInput | Storage::kFixed;
      if ((record.flags & ~kKnown) != 0) damaged(where + " has unknown flags");
      program_.storages_.push_back(
          {unique(record.name, where, seen), record.arena, record.offset, record.bytes, record.flags});
    }
  }

  void read_tensors() {
    std::unordered_set<std::string_view> seen;
    for (const FileTensor &record : table<FileTensor>(header_.tensors, "tensors")) {
      const std::string where = number("tensor", program_.tensors_.size());
      if (record.storage < 0 || record.storage >= static_cast<int64_t>(program_.storages_.size())) {
        damaged(where + " names storage " + std::to_string(record.storage) + ", which isn't there");
      }
      Tensor tensor{unique(record.name, where, seen), record.storage, record.byte_offset, 0, {}};
      tensor.layout.struct_size = sizeof(tensor.layout);
      tensor.layout.dtype = record.dtype;
      tensor.layout.rank = record.rank;
      std::memcpy(tensor.layout.shape, record.shape, sizeof(record.shape));
      std::memcpy(tensor.layout.strides, record.strides, sizeof(record.strides));
      try {
        tensor.bytes = static_cast<uint64_t>(extent_bytes(tensor.layout));
      } catch (const Error &error) {
        damaged(where + " ('" + tensor.name + "'): " + error.message);
      }
      program_.tensors_.push_back(tensor);
    }
  }

  void read_attrs() {
    for (const FileAttr &record : table<FileAttr>(header_.attrs, "attributes")) {
      const std::string where = number("attribute", program_.attrs_.size());
      if (record.kind < SG_ATTR_INT || record.kind > SG_ATTR_STRING) damaged(where + " is of an unknown kind");
      program_.attrs_.push_back({sizeof(sg_attr), text(record.name, where), record.kind, record.i, record.f,
                                 text(record.s, where)});
    }
  }

  void read_instructions() {
    const auto records = table<FileInstruction>(header_.instructions, "instructions");
    program_.instructions_.reserve(records.size());
    for (const FileInstruction &record : records) {
      const std::string where = number("instruction", program_.instructions_.size());
      const uint64_t first = record.first_operand;
      Instruction instruction;
      instruction.op = text(record.op, where);
      instruction.kernel = text(record.kernel, where);
      instruction.inputs = slice(program_.operands_, first, record.num_inputs, "the inputs of " + where);
      instruction.outputs =
          slice(program_.operands_, first + record.num_inputs, record.num_outputs, "the outputs of " + where);
      instruction.attrs = slice(program_.attrs_, record.first_attr, record.num_attrs, "the attributes of " + where);
      instruction.stream = record.stream;
      instruction.waits = slice(program_.operands_, record.first_wait, record.num_waits, "the waits of " + where);
      if (instruction.op[0] == '\0') damaged(where + " has no op");
      check_indices(instruction, where);
      program_.instructions_.push_back(instruction);
    }
  }

  void check_indices(const Instruction &instruction, const std::string &where) const {
    const auto num_tensors = static_cast<int64_t>(program_.tensors_.size());
    for (std::span<const int32_t> side : {instruction.inputs, instruction.outputs}) {
      for (int32_t index : side) {
        if (index < -1 || index >= num_tensors) {
          damaged(where + " (" + instruction.op + ") names tensor " + std::to_string(index) + ", which isn't there");
        }
      }
    }
    for (int32_t index : instruction.waits) {
      if (index < 0 || static_cast<size_t>(index) >= program_.instructions_.size()) {
        damaged(where + " (" + instruction.op + ") waits for instruction " + std::to_string(index) +
                ", which doesn't come before it");
      }
    }
    for (size_t i = 1; i < instruction.attrs.size(); ++i) {
      if (std::strcmp(instruction.attrs[i - 1].name, instruction.attrs[i].name) >= 0) {
        damaged(where + " (" + instruction.op + "): its attributes aren't sorted by name, each once");
      }
    }
  }

  void read_entries() {
    std::unordered_set<std::string_view> seen;
    for (const FileEntry &record : table<FileEntry>(header_.entries, "entries")) {
      const std::string where = number("entry", program_.entries_.size());
      slice(program_.instructions_, record.first_instruction, record.num_instructions, "the instructions of " + where);
      const char *name = unique(record.name, where, seen);
      program_.entries_.push_back({name, record.first_instruction, record.num_instructions});
    }
  }

  std::span<const unsigned char> bytes_;
  Program &program_;
  FileHeader header_{};
};

Program::Program(std::span<const unsigned char> bytes) { ProgramReader(bytes, *this).read(); }

std::vector<std::string> Program::describe(const Instruction &instruction) const {
  std::vector<std::string> lines;
  auto describe_side = [&](const char *side, std::span<const int32_t> indices) {
    for (size_t i = 0; i < indices.size(); ++i) {
      const std::string name = std::string(side) + std::to_string(i);
      if (indices[i] < 0) {
        lines.push_back(name + ": absent");
      } else {
        const Tensor &tensor = tensors_[static_cast<size_t>(indices[i])];
        lines.push_back(operand_text(name + " " + tensor.name, tensor.layout));
      }
    }
  };
  describe_side("input ", instruction.inputs);
  describe_side("output ", instruction.outputs);
  return lines;
}

void Program::fail(size_t index, const std::string &message, const std::string &hint) const {
  const Instruction &instruction = instructions_[index];
  Error error("instruction " + std::to_string(index) + " (" + instruction.op + "): " + message, hint);
  error.op = instruction.op;
  error.instruction = static_cast<int64_t>(index);
  error.operands = describe(instruction);
  throw error;
}

}  // namespace surogate

#include "verify.h"

#include <algorithm>
#include <map>
#include <vector>

#include "dtype.h"
#include "tensor.h"

namespace surogate {
namespace {

constexpr uint64_t kMaxAlignment = 4096;

std::string quoted(const char *name) {
  std::string text("'");
  return text.append(name).append("'");
}

void check_arenas_and_storages(const Program &program) {
  for (const Arena &arena : program.arenas()) {
    const bool power_of_two = arena.alignment != 0 && (arena.alignment & (arena.alignment - 1)) == 0;
    if (!power_of_two || arena.alignment > kMaxAlignment) {
      throw Error("arena " + quoted(arena.name) + " wants alignment " + std::to_string(arena.alignment) +
                  ": it must be a power of two, at most " + std::to_string(kMaxAlignment));
    }
  }
  for (const Storage &storage : program.storages()) {
    if (storage.external()) {
      if (storage.offset != 0) throw Error("external storage " + quoted(storage.name) + " has an offset");
      continue;
    }
    const Arena &arena = program.arenas()[static_cast<size_t>(storage.arena)];
    if (storage.offset > arena.bytes || storage.bytes > arena.bytes - storage.offset) {
      throw Error("storage " + quoted(storage.name) + " (" + std::to_string(storage.bytes) + " bytes at " +
                  std::to_string(storage.offset) + ") doesn't fit into arena " + quoted(arena.name) + " of " +
                  std::to_string(arena.bytes) + " bytes");
    }
  }
}

void check_tensors(const Program &program) {
  for (const Tensor &tensor : program.tensors()) {
    const Storage &storage = program.storage_of(tensor);
    if (tensor.byte_offset > storage.bytes || tensor.bytes > storage.bytes - tensor.byte_offset) {
      throw Error("tensor " + operand_text(tensor.name, tensor.layout) + " (" + std::to_string(tensor.bytes) +
                  " bytes at " + std::to_string(tensor.byte_offset) + ") doesn't fit into storage " +
                  quoted(storage.name) + " of " + std::to_string(storage.bytes) + " bytes");
    }
    const uint64_t unit = is_block_dtype(tensor.layout.dtype) ? 2 : dtype_info(tensor.layout.dtype)->block_bytes;
    if ((storage.offset + tensor.byte_offset) % unit != 0) {
      throw Error("tensor " + operand_text(tensor.name, tensor.layout) + " isn't aligned to its elements");
    }
  }
}

// Sorted by stride, each axis must step over everything that the axes below it reach.
bool elements_are_distinct(const sg_tensor &tensor) {
  std::vector<std::pair<int64_t, int64_t>> axes;  // (stride, size)
  for (int32_t axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] == 0) return true;
    if (tensor.shape[axis] > 1) axes.emplace_back(tensor.strides[axis], tensor.shape[axis]);
  }
  std::sort(axes.begin(), axes.end());
  int64_t reach = 0;
  for (auto [stride, size] : axes) {
    if (stride <= reach) return false;
    reach += stride * (size - 1);  // fits: extent_bytes computed the same sum
  }
  return true;
}

// Which storages are live while an entry runs, told instruction by instruction.
class Liveness {
 public:
  explicit Liveness(const Program &program) : program_(program), live_(program.arenas().size()) {}

  void check(const Entry &entry) {
    find_uses(entry);
    for (auto &arena : live_) arena.clear();
    for (size_t s = 0; s < uses_.size(); ++s) {
      if (program_.storages()[s].always_live()) begin(s, entry.first, entry);
    }
    std::vector<std::vector<size_t>> begins(entry.count), ends(entry.count);
    for (size_t s = 0; s < uses_.size(); ++s) {
      if (program_.storages()[s].always_live() || !uses_[s].used) continue;
      begins[uses_[s].first - entry.first].push_back(s);
      ends[uses_[s].last - entry.first].push_back(s);
    }
    for (uint32_t i = 0; i < entry.count; ++i) {
      for (size_t s : begins[i]) begin(s, entry.first + i, entry);
      for (size_t s : ends[i]) end(s);
    }
  }

 private:
  struct Use {
    bool used = false;
    uint32_t first = 0, last = 0;
  };

  void find_uses(const Entry &entry) {
    uses_.assign(program_.storages().size(), {});
    for (uint32_t i = entry.first; i < entry.first + entry.count; ++i) {
      const Instruction &instruction = program_.instructions()[i];
      for (std::span<const int32_t> side : {instruction.inputs, instruction.outputs}) {
        for (int32_t index : side) {
          if (index < 0) continue;
          Use &use = uses_[static_cast<size_t>(program_.tensors()[static_cast<size_t>(index)].storage)];
          if (!use.used) use = {true, i, i};
          use.last = i;
        }
      }
    }
  }

  void begin(size_t index, uint32_t instruction, const Entry &entry) {
    const Storage &storage = program_.storages()[index];
    if (storage.external() || storage.bytes == 0) return;
    auto &arena = live_[static_cast<size_t>(storage.arena)];
    auto next = arena.lower_bound(storage.offset);
    size_t other = index;
    if (next != arena.end() && next->first < storage.offset + storage.bytes) other = next->second;
    if (next != arena.begin()) {
      const size_t before = std::prev(next)->second;
      if (program_.storages()[before].offset + program_.storages()[before].bytes > storage.offset) other = before;
    }
    if (other != index) {
      throw Error("storages " + quoted(program_.storages()[other].name) + " and " + quoted(storage.name) +
                  " overlap in arena " + quoted(program_.arenas()[static_cast<size_t>(storage.arena)].name) +
                  " and are both live at instruction " + std::to_string(instruction) + " of entry " +
                  quoted(entry.name));
    }
    arena.emplace(storage.offset, index);
  }

  void end(size_t index) {
    const Storage &storage = program_.storages()[index];
    if (!storage.external() && storage.bytes > 0) live_[static_cast<size_t>(storage.arena)].erase(storage.offset);
  }

  const Program &program_;
  std::vector<Use> uses_;
  std::vector<std::map<uint64_t, size_t>> live_;  // for each arena: offset -> storage
};

// A tensor whose axes but the first are dense, as a band of columns of a matrix of bytes: its storage cut into rows of
// `stride` bytes.
struct Band {
  uint64_t stride = 0, begin = 0, end = 0;  // columns [begin, end) of each row; stride 0: it isn't one
  bool is_band() const { return stride != 0; }
};

Band band_of(const Tensor &tensor) {
  const sg_tensor &layout = tensor.layout;
  if (layout.rank < 2 || is_block_dtype(layout.dtype)) return {};
  int64_t expected = 1;
  for (int32_t axis = layout.rank - 1; axis >= 1; --axis) {
    if (layout.shape[axis] != 1 && layout.strides[axis] != expected) return {};
    expected *= layout.shape[axis];
  }
  const auto unit = static_cast<uint64_t>(dtype_info(layout.dtype)->block_bytes);
  const uint64_t stride = static_cast<uint64_t>(layout.strides[0]) * unit;
  const uint64_t width = static_cast<uint64_t>(expected) * unit;
  if (stride == 0 || width == 0) return {};
  const uint64_t begin = tensor.byte_offset % stride;
  if (begin + width > stride) return {};
  return {stride, begin, begin + width};
}

// What an entry has written so far, storage by storage. Where several tensors fill a storage band by band, what is read
// counts as written once they leave no gap in it.
class Written {
 public:
  explicit Written(const Program &program) : storages_(program.storages().size()) {
    for (size_t s = 0; s < storages_.size(); ++s) {
      storages_[s].whole = program.storages()[s].external() || program.storages()[s].always_live();
    }
  }

  void add(const Tensor &tensor) {
    State &state = storages_[static_cast<size_t>(tensor.storage)];
    const Band band = band_of(tensor);
    if (!band.is_band() || band.end - band.begin == band.stride || (state.stride != 0 && state.stride != band.stride)) {
      state.whole = true;
      return;
    }
    state.stride = band.stride;
    uint64_t begin = band.begin, end = band.end;
    for (auto at = state.bands.begin(); at != state.bands.end();) {
      if (at->first > end || at->second < begin) {
        ++at;
        continue;
      }
      begin = std::min(begin, at->first), end = std::max(end, at->second);
      at = state.bands.erase(at);
    }
    state.bands.emplace(begin, end);
  }

  bool has(const Tensor &tensor) const {
    const State &state = storages_[static_cast<size_t>(tensor.storage)];
    if (state.whole) return true;
    const Band band = band_of(tensor);
    const bool same_rows = band.is_band() && band.stride == state.stride;
    const uint64_t begin = same_rows ? band.begin : 0, end = same_rows ? band.end : state.stride;
    const auto after = state.bands.upper_bound(begin);
    return after != state.bands.begin() && std::prev(after)->second >= end;
  }

 private:
  struct State {
    bool whole = false;
    uint64_t stride = 0;
    std::map<uint64_t, uint64_t> bands;  // begin -> end, apart from each other
  };
  std::vector<State> storages_;
};

void check_written_before_read(const Program &program, const Entry &entry) {
  Written written(program);
  for (uint32_t i = entry.first; i < entry.first + entry.count; ++i) {
    const Instruction &instruction = program.instructions()[i];
    for (int32_t index : instruction.inputs) {
      if (index < 0) continue;
      const Tensor &tensor = program.tensors()[static_cast<size_t>(index)];
      if (!written.has(tensor)) {
        program.fail(i, "entry " + quoted(entry.name) + " reads " + quoted(tensor.name) + " before anything wrote it",
                     "write it earlier in this entry, or mark its storage persistent or as an input");
      }
    }
    for (int32_t index : instruction.outputs) {
      if (index >= 0) written.add(program.tensors()[static_cast<size_t>(index)]);
    }
  }
}

void check_instructions(const Program &program, uint32_t num_streams) {
  for (size_t i = 0; i < program.instructions().size(); ++i) {
    const Instruction &instruction = program.instructions()[i];
    if (instruction.stream >= num_streams) {
      program.fail(i, "it runs on stream " + std::to_string(instruction.stream) + ", the backend has " +
                          std::to_string(num_streams));
    }
    for (int32_t index : instruction.outputs) {
      if (index < 0) continue;
      const Tensor &tensor = program.tensors()[static_cast<size_t>(index)];
      if (!elements_are_distinct(tensor.layout)) {
        program.fail(i, "output " + quoted(tensor.name) + " has several elements in one place");
      }
      if ((program.storage_of(tensor).flags & Storage::kFixed) != 0) {
        program.fail(i, "output " + quoted(tensor.name) + " lies in a storage that is marked as fixed");
      }
    }
  }
}

bool overlap(const Tensor &a, const Tensor &b) {
  if (a.storage != b.storage || a.byte_offset >= b.byte_offset + b.bytes || b.byte_offset >= a.byte_offset + a.bytes) {
    return false;
  }
  // Columns of one matrix lie between each other without meeting.
  const Band left = band_of(a), right = band_of(b);
  const bool same_rows = left.is_band() && left.stride == right.stride;
  return !same_rows || (left.begin < right.end && right.begin < left.end);
}

bool coincide(const Tensor &a, const Tensor &b) {
  return a.byte_offset == b.byte_offset && a.layout.dtype == b.layout.dtype && a.layout.rank == b.layout.rank &&
         std::equal(a.layout.shape, a.layout.shape + a.layout.rank, b.layout.shape) &&
         std::equal(a.layout.strides, a.layout.strides + a.layout.rank, b.layout.strides);
}

// Which instructions of an entry are over before which begin: those earlier on the same stream, and what waits lead to.
class Clocks {
 public:
  Clocks(const Program &program, const Entry &entry) : program_(program), first_(entry.first) {
    for (uint32_t i = 0; i < entry.count; ++i) {
      streams_ = std::max<size_t>(streams_, program.instructions()[first_ + i].stream + size_t{1});
    }
    seen_.resize(streams_ * entry.count);
    std::vector<std::vector<uint32_t>> last(streams_, std::vector<uint32_t>(streams_));
    for (uint32_t i = 0; i < entry.count; ++i) {
      const Instruction &instruction = program.instructions()[first_ + i];
      std::vector<uint32_t> &clock = last[instruction.stream];
      for (int32_t waited : instruction.waits) {
        const uint32_t *other = &seen_[streams_ * (static_cast<uint32_t>(waited) - first_)];
        for (size_t s = 0; s < streams_; ++s) clock[s] = std::max(clock[s], other[s]);
      }
      clock[instruction.stream] = i + 1;
      std::copy(clock.begin(), clock.end(), seen_.begin() + static_cast<std::ptrdiff_t>(streams_ * i));
    }
  }

  size_t streams() const { return streams_; }
  bool before(uint32_t earlier, uint32_t later) const {
    const uint32_t stream = program_.instructions()[earlier].stream;
    return earlier < later && seen_[streams_ * (later - first_) + stream] > earlier - first_;
  }

 private:
  const Program &program_;
  uint32_t first_;
  size_t streams_ = 0;
  // For each instruction, stream by stream: how far into the entry the last instruction lies, counted from 1, that is
  // over before it begins; its own place on its own stream.
  std::vector<uint32_t> seen_;
};

// Whether streams order all that meets in memory. Storages of an arena that share bytes are one place, whatever they
// hold.
class Order {
 public:
  explicit Order(const Program &program) : program_(program) {}

  void check(const Entry &entry) {
    const auto first = program_.instructions().begin() + entry.first;
    const auto on_other_stream = [&](const Instruction &i) { return i.stream != first->stream; };
    if (entry.count == 0 || std::none_of(first, first + entry.count, on_other_stream)) return;
    const Clocks clocks(program_, entry);
    entry_ = &entry, clocks_ = &clocks;
    places_.assign(program_.arenas().size() + program_.storages().size(), {});
    for (uint32_t i = entry.first; i < entry.first + entry.count; ++i) {
      const Instruction &instruction = program_.instructions()[i];
      for (int32_t tensor : instruction.inputs) touch({i, tensor, false});
      for (int32_t tensor : instruction.outputs) touch({i, tensor, true});
    }
  }

 private:
  struct Access {
    uint32_t instruction;
    int32_t tensor;
    bool writes;
  };
  // Bytes [key, end) of a place, and who touched them: what comes later need not be held against the others.
  struct Segment {
    uint64_t end;
    std::vector<Access> accesses;
  };
  using Place = std::map<uint64_t, Segment>;

  const Tensor &tensor_of(const Access &access) const { return program_.tensors()[static_cast<size_t>(access.tensor)]; }

  void touch(const Access &access) {
    if (access.tensor < 0 || tensor_of(access).bytes == 0) return;
    const Tensor &tensor = tensor_of(access);
    const Storage &storage = program_.storage_of(tensor);
    const size_t place = storage.external() ? program_.arenas().size() + static_cast<size_t>(tensor.storage)
                                            : static_cast<size_t>(storage.arena);
    const uint64_t begin = storage.offset + tensor.byte_offset, end = begin + tensor.bytes;
    const auto first = cut(places_[place], begin, end);
    const auto past = places_[place].lower_bound(end);
    for (auto at = first; at != past; ++at) {
      for (const Access &earlier : at->second.accesses) check_pair(earlier, access);
    }
    if (access.writes && is_solid(tensor)) {  // everything before it is over, and nobody needs to ask again
      places_[place].erase(first, past);
      places_[place].emplace(begin, Segment{end, {access}});
      return;
    }
    for (auto at = first; at != past; ++at) {
      std::erase_if(at->second.accesses, [&](const Access &earlier) { return stands_for(access, earlier); });
      at->second.accesses.push_back(access);
    }
  }

  // Makes [begin, end) whole segments; the first of them.
  static Place::iterator cut(Place &place, uint64_t begin, uint64_t end) {
    split(place, begin);
    split(place, end);
    uint64_t at = begin;
    for (auto next = place.lower_bound(begin); at < end; ++next) {
      const uint64_t free_until = next == place.end() ? end : std::min(end, next->first);
      if (at < free_until) next = place.emplace(at, Segment{free_until, {}}).first;
      at = next->second.end;
    }
    return place.find(begin);
  }

  static void split(Place &place, uint64_t at) {
    auto next = place.lower_bound(at);
    if (next == place.begin()) return;
    Segment &before = std::prev(next)->second;
    if (before.end <= at) return;
    place.emplace(at, Segment{before.end, before.accesses});
    before.end = at;
  }

  // Whether its elements fill the bytes from its first to its last.
  static bool is_solid(const Tensor &tensor) {
    if (!elements_are_distinct(tensor.layout)) return false;
    const sg_dtype_info &info = *dtype_info(tensor.layout.dtype);
    uint64_t elements = 1;
    for (int32_t axis = 0; axis < tensor.layout.rank; ++axis) {
      elements *= static_cast<uint64_t>(tensor.layout.shape[axis]);
    }
    return elements / static_cast<uint64_t>(info.block_elems) * static_cast<uint64_t>(info.block_bytes) == tensor.bytes;
  }

  bool meet(const Access &a, const Access &b) const {
    const Tensor &left = tensor_of(a), &right = tensor_of(b);
    return left.storage != right.storage || overlap(left, right);
  }

  // Whether all that has to follow `earlier` has to follow `later` too, which itself follows. Both touch one segment.
  bool stands_for(const Access &later, const Access &earlier) const {
    if (earlier.writes && !later.writes) return false;
    const bool one_instruction = earlier.instruction == later.instruction;
    if (!one_instruction && !clocks_->before(earlier.instruction, later.instruction)) return false;
    const Tensor &over = tensor_of(later), &under = tensor_of(earlier);
    if (is_solid(over)) return true;
    if (over.storage != under.storage) return false;
    const Band outer = band_of(over), inner = band_of(under);
    return outer.is_band() && outer.stride == inner.stride && outer.begin <= inner.begin && inner.end <= outer.end;
  }

  void check_pair(const Access &earlier, const Access &later) const {
    if (!earlier.writes && !later.writes) return;
    if (earlier.instruction == later.instruction || clocks_->before(earlier.instruction, later.instruction)) return;
    if (!meet(earlier, later)) return;
    const Instruction &first = program_.instructions()[earlier.instruction];
    const Instruction &second = program_.instructions()[later.instruction];
    const Storage &storage = program_.storage_of(tensor_of(later)), &other = program_.storage_of(tensor_of(earlier));
    const std::string shared = &storage == &other ? "" : ", which shares memory with storage " + quoted(other.name);
    const std::string place = std::to_string(earlier.instruction);
    const auto told = [&](const Access &access, const Instruction &instruction) {
      return (access.writes ? "writes " : "reads ") + quoted(tensor_of(access).name) + " on stream " +
             std::to_string(instruction.stream);
    };
    program_.fail(later.instruction,
                  "in entry " + quoted(entry_->name) + " it " + told(later, second) + " in storage " +
                      quoted(storage.name) + shared + ", and nothing makes it follow instruction " + place + " (" +
                      first.op + "), which " + told(earlier, first),
                  "let it wait for instruction " + place + ", or for one that comes after that one");
  }

  const Program &program_;
  const Entry *entry_ = nullptr;
  const Clocks *clocks_ = nullptr;
  std::vector<Place> places_;  // one an arena, then one a storage for those that are external
};

// Events are recorded anew whenever an entry runs: one of another entry's would tell of another run.
void check_waits(const Program &program, const Entry &entry) {
  for (uint32_t i = entry.first; i < entry.first + entry.count; ++i) {
    for (int32_t waited : program.instructions()[i].waits) {
      if (static_cast<uint32_t>(waited) >= entry.first) continue;
      program.fail(i, "it waits for instruction " + std::to_string(waited) + ", which is not one of entry " +
                          quoted(entry.name),
                   "streams are joined where an entry begins: what ran before is over");
    }
  }
}

}  // namespace

void verify(const Program &program, uint32_t num_streams) {
  check_arenas_and_storages(program);
  check_tensors(program);
  check_instructions(program, num_streams);
  Liveness liveness(program);
  Order order(program);
  for (const Entry &entry : program.entries()) {
    check_written_before_read(program, entry);
    liveness.check(entry);
    check_waits(program, entry);
    order.check(entry);
  }
}

void verify_overlap(const Program &program, size_t index, const sg_kernel &kernel) {
  const Instruction &instruction = program.instructions()[index];
  const bool may_work_in_place = (kernel.traits & SG_TRAIT_IN_PLACE) != 0;
  for (size_t o = 0; o < instruction.outputs.size(); ++o) {
    if (instruction.outputs[o] < 0) continue;
    const Tensor &output = program.tensors()[static_cast<size_t>(instruction.outputs[o])];
    for (size_t i = 0; i < instruction.inputs.size(); ++i) {
      if (instruction.inputs[i] < 0) continue;
      const Tensor &input = program.tensors()[static_cast<size_t>(instruction.inputs[i])];
      const bool in_place = may_work_in_place && o == 0 && static_cast<int64_t>(i) == kernel.in_place_input;
      if (overlap(output, input) && !(in_place && coincide(output, input))) {
        program.fail(index, "output " + quoted(output.name) + " overlaps input " + quoted(input.name) +
                                ", and kernel " + quoted(kernel.name) + " doesn't work in place of it");
      }
    }
    for (size_t p = 0; p < o; ++p) {
      if (instruction.outputs[p] < 0) continue;
      const Tensor &other = program.tensors()[static_cast<size_t>(instruction.outputs[p])];
      if (overlap(output, other)) {
        program.fail(index, "outputs " + quoted(other.name) + " and " + quoted(output.name) + " overlap");
      }
    }
  }
}

}  // namespace surogate

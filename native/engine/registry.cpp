#include "registry.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "call.h"
#include "host.h"

namespace surogate {
namespace {

// Reads a struct of the ABI as this engine knows it: fields that the writer did not have are zero.
template <class T>
T read_struct(const T *source) {
  T copy{};
  std::memcpy(&copy, source, std::min(source->struct_size, sizeof(T)));
  copy.struct_size = sizeof(T);
  return copy;
}

std::string version_text(uint32_t major, uint32_t minor) {
  return std::to_string(major) + "." + std::to_string(minor);
}

bool is_name(const char *text) { return text != nullptr && text[0] != '\0'; }

Kernel read_kernel(const sg_kernel *source, const std::string &library, int32_t index) {
  const std::string where = "kernel " + std::to_string(index) + " of library '" + library + "'";
  if (source == nullptr) throw Error(where + " is NULL");
  Kernel kernel{read_struct(source), library, source};
  if (!is_name(kernel.table.op) || !is_name(kernel.table.backend) || !is_name(kernel.table.name)) {
    throw Error(where + " lacks an op, a backend or a name");
  }
  if (kernel.table.supports == nullptr || kernel.table.run == nullptr) {
    throw Error(where + " (" + kernel.table.op + "/" + kernel.table.name + ") lacks supports or run");
  }
  return kernel;
}

}  // namespace

Registry &Registry::global() {
  static Registry registry;
  return registry;
}

void Registry::note_failure(const std::string &origin, const std::string &reason) {
  std::lock_guard lock(mutex_);
  std::erase_if(libraries_, [&](const Library &known) { return known.origin == origin && !known.failure.empty(); });
  Library record;
  record.origin = origin;
  record.failure = reason;
  libraries_.push_back(record);
}

void Registry::add(sg_kernel_library_fn fill, const std::string &origin) {
  sg_kernel_library library{};
  library.struct_size = sizeof(library);
  char error[512] = "";
  if (fill(host_table(), &library, error, sizeof(error)) != SG_OK) {
    error[sizeof(error) - 1] = '\0';
    const std::string reason = error[0] != '\0' ? error : "it gave no reason";
    note_failure(origin, reason);
    throw Error("kernel library '" + origin + "' cannot be used here: " + reason);
  }
  add(library, origin);
}

void Registry::add(const sg_kernel_library &source, const std::string &origin) {
  try {
    // The size and the version come first in every version of the struct; nothing else is read of another one.
    const sg_kernel_library library = read_struct(&source);
    if (library.abi_major != SG_ABI_MAJOR) {
      throw Error("kernel library '" + origin + "' was built for kernel ABI " +
                      version_text(library.abi_major, library.abi_minor) + ", this engine speaks " +
                      version_text(SG_ABI_MAJOR, SG_ABI_MINOR),
                  "rebuild it against this engine's headers, or install the release of it that matches");
    }
    if (!is_name(library.name)) throw Error("kernel library '" + origin + "' has no name");
    if (library.num_kernels < 0 || (library.num_kernels > 0 && library.kernels == nullptr)) {
      throw Error("kernel library '" + std::string(library.name) + "' has no kernel table");
    }
    Library record;
    record.name = library.name;
    record.version = library.version != nullptr ? library.version : "";
    record.origin = origin;
    record.abi_major = library.abi_major;
    record.abi_minor = library.abi_minor;
    record.num_kernels = library.num_kernels;
    std::lock_guard lock(mutex_);
    take(library, origin, record);
  } catch (const Error &error) {
    note_failure(origin, error.message);
    throw;
  }
}

// Kernels live as long as the process: sessions point at them.
void Registry::take(const sg_kernel_library &library, const std::string &origin, Library &record) {
  auto taken = by_op_;
  std::vector<std::unique_ptr<Kernel>> fresh;
  for (int32_t i = 0; i < library.num_kernels; ++i) {
    auto kernel = std::make_unique<Kernel>(read_kernel(library.kernels[i], record.name, i));
    auto &list = taken[{kernel->table.op, kernel->table.backend}];
    auto same = std::find_if(list.begin(), list.end(), [&](const Kernel *known) {
      return std::strcmp(known->table.name, kernel->table.name) == 0;
    });
    if (same == list.end()) {
      list.push_back(kernel.get());
      fresh.push_back(std::move(kernel));
    } else if ((*same)->source != kernel->source) {
      throw Error("library '" + record.name + "' brings kernel '" + kernel->table.name + "' for op '" +
                      kernel->table.op + "' on '" + kernel->table.backend + "', which library '" + (*same)->library +
                      "' brought already",
                  "give one of the two another name, or load only one of them");
    }
  }
  if (fresh.empty() && library.num_kernels > 0) return;  // the same table again
  if (library.backend != nullptr) take_backend(*library.backend, record);
  by_op_ = std::move(taken);
  for (auto &kernel : fresh) kernel.release();
  std::erase_if(libraries_, [&](const Library &known) { return known.origin == origin && !known.failure.empty(); });
  libraries_.push_back(record);
}

void Registry::take_backend(const sg_backend &table, const Library &record) {
  if (table.struct_size < sizeof(sg_backend) || !is_name(table.name)) {
    throw Error("library '" + record.name + "' brings a backend that lacks functions of kernel ABI " +
                version_text(SG_ABI_MAJOR, SG_ABI_MINOR));
  }
  const auto [known, added] = backends_.try_emplace(table.name, &table);
  if (!added && known->second != &table) {
    throw Error("library '" + record.name + "' brings backend '" + table.name + "', which another library brought already",
                "load only one of the two");
  }
}

const sg_backend *Registry::backend(const std::string &name) const {
  std::lock_guard lock(mutex_);
  const auto found = backends_.find(name);
  if (found != backends_.end()) return found->second;
  for (const auto &[key, list] : by_op_) {
    if (key.second == name) return nullptr;
  }
  std::string known = "cpu";
  for (const auto &[other, table] : backends_) known += ", " + other;
  throw Error("no device for backend '" + name + "'", "available backends: " + known);
}

Choice Registry::select(const sg_call &call, const std::string &backend, std::string_view requested,
                        uint32_t traits) const {
  Choice choice;
  {
    std::lock_guard lock(mutex_);
    auto found = by_op_.find({call.op, backend});
    if (found != by_op_.end()) {
      for (const Kernel *kernel : found->second) choice.candidates.push_back({kernel, 0});
    }
  }
  for (Candidate &candidate : choice.candidates) {
    const bool fits = (candidate.kernel->table.traits & traits) == traits;
    candidate.score = fits ? candidate.kernel->table.supports(&call) : 0;
  }
  std::stable_sort(choice.candidates.begin(), choice.candidates.end(), [](const Candidate &a, const Candidate &b) {
    // Names break a tie, so that the choice does not hang on the order in which libraries were loaded.
    return a.score != b.score ? a.score > b.score : std::strcmp(a.kernel->table.name, b.kernel->table.name) < 0;
  });
  std::string known;
  for (const Candidate &candidate : choice.candidates) {
    const std::string name = candidate.kernel->table.name;
    const bool wanted = requested.empty() || name == requested;
    if (wanted && candidate.score > 0 && choice.kernel == nullptr) {
      choice.kernel = candidate.kernel;
      choice.score = candidate.score;
    }
    known += (known.empty() ? "" : ", ") + name + " (" + candidate.kernel->library + ") scores " +
             std::to_string(candidate.score);
  }
  if (choice.kernel != nullptr) return choice;

  Error error("no kernel for op '" + std::string(call.op) + "' on backend '" + backend + "'");
  if (!requested.empty()) {
    error.message = "kernel '" + std::string(requested) + "' cannot run op '" + call.op + "' on '" + backend + "'";
  }
  error.hint = choice.candidates.empty()
                   ? "no library loaded brings this op: install the plugin that does"
                   : "candidates: " + known + "; a score of 0 means that a kernel cannot run these operands" +
                         ((traits & SG_TRAIT_ROW_INVARIANT) != 0 ? ", or not with the same bits in every batch" : "");
  error.op = call.op;
  error.operands = describe_operands(call);
  throw error;
}

std::vector<Kernel> Registry::kernels() const {
  std::lock_guard lock(mutex_);
  std::vector<Kernel> all;
  for (const auto &[key, list] : by_op_) {
    for (const Kernel *kernel : list) all.push_back(*kernel);
  }
  return all;
}

std::vector<Library> Registry::libraries() const {
  std::lock_guard lock(mutex_);
  return libraries_;
}

}  // namespace surogate

// The kernels of this process: which library brought them, and which one runs a given call.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"
#include "surogate/abi.h"

namespace surogate {

struct Kernel {
  sg_kernel table{};  // a field that the library's table is too old for is zero
  std::string library;
  const sg_kernel *source = nullptr;
};

struct Library {
  std::string name;
  std::string version;
  std::string origin;  // the file it was loaded from, or what its plugin called it
  uint32_t abi_major = 0;
  uint32_t abi_minor = 0;
  int32_t num_kernels = 0;
  std::string failure;  // empty: loaded
};

struct Candidate {
  const Kernel *kernel = nullptr;
  int32_t score = 0;
};

struct Choice {
  const Kernel *kernel = nullptr;
  int32_t score = 0;
  std::vector<Candidate> candidates;  // every kernel of (op, backend), best score first
};

class SUROGATE_API Registry {
 public:
  static Registry &global();

  // Takes over every kernel of a library, or none. Throws Error for another major ABI version, an incomplete kernel
  // or a name that (op, backend) has already; the reason is kept and listed. The same table again changes nothing.
  void add(const sg_kernel_library &library, const std::string &origin);
  // As above, calling `fill` for the table.
  void add(sg_kernel_library_fn fill, const std::string &origin);
  void note_failure(const std::string &origin, const std::string &reason);

  // The kernel for a call: the one named, or the highest score of those with all of `traits`, which a kernel without them
  // is a candidate of score 0 for. Throws Error with every candidate and its score.
  Choice select(const sg_call &call, const std::string &backend, std::string_view requested, uint32_t traits = 0) const;

  // The memory and queues of a kind of device; nullptr for one whose kernels work in the host's memory. Throws Error for
  // a backend that no library brought.
  const sg_backend *backend(const std::string &name) const;

  std::vector<Kernel> kernels() const;
  std::vector<Library> libraries() const;

 private:
  void take(const sg_kernel_library &library, const std::string &origin, Library &record);
  void take_backend(const sg_backend &table, const Library &record);

  mutable std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, std::vector<const Kernel *>> by_op_;  // (op, backend)
  std::map<std::string, const sg_backend *> backends_;
  std::vector<Library> libraries_;
};

}  // namespace surogate

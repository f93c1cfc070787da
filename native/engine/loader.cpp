#include "loader.h"

#include <dlfcn.h>

#include "registry.h"

namespace surogate {

std::string engine_directory() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void *>(&engine_directory), &info) == 0 || info.dli_fname == nullptr) {
    throw Error("the engine cannot find out which file it was loaded from");
  }
  const std::string file = info.dli_fname;
  const size_t slash = file.rfind('/');
  return slash == std::string::npos ? "." : file.substr(0, slash);
}

void load_kernel_library(const std::string &path) {
  Registry &registry = Registry::global();
  void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char *problem = dlerror();
    const std::string reason = problem != nullptr ? problem : "unknown reason";
    registry.note_failure(path, reason);
    throw Error("kernel library '" + path + "' cannot be opened: " + reason);
  }
  void *symbol = dlsym(handle, SG_KERNEL_LIBRARY_SYMBOL);
  if (symbol == nullptr) {
    const std::string reason = std::string("it does not export ") + SG_KERNEL_LIBRARY_SYMBOL;
    registry.note_failure(path, reason);
    dlclose(handle);
    throw Error("'" + path + "' is not a kernel library: " + reason);
  }
  registry.add(reinterpret_cast<sg_kernel_library_fn>(symbol), path);
}

}  // namespace surogate

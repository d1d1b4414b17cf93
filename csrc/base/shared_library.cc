#include "base/shared_library.h"

#include <dlfcn.h>

namespace kvxfer {

SharedLibrary::SharedLibrary(std::span<const std::string> names) {
  for (const std::string& name : names) {
    handle_ = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle_ != nullptr) {
      name_ = name;
      return;
    }
    const char* problem = ::dlerror();
    problem_ = problem != nullptr ? problem : "cannot load " + name;
  }
}

void* SharedLibrary::address(const char* symbol) const {
  return handle_ == nullptr ? nullptr : ::dlsym(handle_, symbol);
}

}  // namespace kvxfer

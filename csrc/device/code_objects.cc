#include "device/code_objects.h"

#include <cstdlib>
#include <fstream>
#include <iterator>

#include "kvxfer/status.h"

namespace kvxfer {

std::vector<CodeObject> code_objects(GpuVendor vendor) {
  const char* path = std::getenv("KVXFER_GPU_CODE");
  if (path == nullptr || *path == '\0') return built_code_objects(vendor);
  std::ifstream file(path, std::ios::binary);
  auto code = std::make_shared<const std::string>(std::istreambuf_iterator<char>(file),
                                                  std::istreambuf_iterator<char>());
  if (!file || code->empty()) {
    throw Error(StatusCode::kInvalid, std::string("KVXFER_GPU_CODE names ") + path +
                                          ", which cannot be read or is empty");
  }
  return {{path, code->data(), code}};
}

}  // namespace kvxfer

#include "device/code_objects.h"

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace kvxfer {
namespace {

uint32_t first_word(const CodeObject& object) {
  uint32_t word = 0;
  std::memcpy(&word, object.data, sizeof(word));
  return word;
}

TEST_CASE("code objects: those of the build are what their vendors' loaders take") {
  ::unsetenv("KVXFER_GPU_CODE");
  for (const CodeObject& object : code_objects(GpuVendor::kAmd)) {
    CAPTURE(object.target);
    CHECK(object.target.rfind("gfx", 0) == 0);
    CHECK(first_word(object) == 0x464c457f);  // ELF
  }
  for (const CodeObject& object : code_objects(GpuVendor::kNvidia)) {
    CAPTURE(object.target);
    CHECK(object.target.rfind("sm_", 0) == 0);
    CHECK(first_word(object) == 0xba55ed50);  // a fat binary
  }
}

}  // namespace
}  // namespace kvxfer

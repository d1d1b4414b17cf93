#ifndef KVXFER_ELEMENT_H_
#define KVXFER_ELEMENT_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvxfer {

// Element types of a cache. The values travel on the wire: append, never renumber. The 8-bit float
// dialects are named one by one because the same byte means different numbers in each.
enum class ElementType : uint8_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kUInt8 = 3,
  kFloat8E4M3FN = 4,
  kFloat8E4M3FNUZ = 5,
  kFloat8E5M2 = 6,
  kFloat8E5M2FNUZ = 7,
};

size_t element_bytes(ElementType type);
const char* element_name(ElementType type);              // e.g. "bfloat16", "float8_e4m3fn"
ElementType element_from_name(const std::string& name);  // throws Error(kInvalid)
bool is_float8(ElementType type);

}  // namespace kvxfer

#endif  // KVXFER_ELEMENT_H_

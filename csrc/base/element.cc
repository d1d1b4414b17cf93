#include <array>

#include "kvxfer/element.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

struct Element {
  const char* name;
  size_t bytes;
};

// Indexed by ElementType.
constexpr std::array<Element, 8> kElements = {{
    {"float32", 4},
    {"float16", 2},
    {"bfloat16", 2},
    {"uint8", 1},
    {"float8_e4m3fn", 1},
    {"float8_e4m3fnuz", 1},
    {"float8_e5m2", 1},
    {"float8_e5m2fnuz", 1},
}};

const Element& element(ElementType type) {
  const auto index = static_cast<size_t>(type);
  if (index >= kElements.size()) {
    throw Error(StatusCode::kInvalid, "element type " + std::to_string(index) +
                                          " is unknown; the highest known is " +
                                          std::to_string(kElements.size() - 1));
  }
  return kElements[index];
}

}  // namespace

size_t element_bytes(ElementType type) { return element(type).bytes; }

const char* element_name(ElementType type) { return element(type).name; }

bool is_float8(ElementType type) { return type >= ElementType::kFloat8E4M3FN; }

ElementType element_from_name(const std::string& name) {
  std::string known;
  for (size_t i = 0; i < kElements.size(); ++i) {
    if (name == kElements[i].name) return static_cast<ElementType>(i);
    known += known.empty() ? "" : ", ";
    known += kElements[i].name;
  }
  throw Error(StatusCode::kInvalid,
              "element type \"" + name + "\" is not supported; the supported ones are " + known);
}

}  // namespace kvxfer

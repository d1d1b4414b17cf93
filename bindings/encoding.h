#ifndef KVXFER_BINDINGS_ENCODING_H_
#define KVXFER_BINDINGS_ENCODING_H_

#include <cstdint>
#include <string>
#include <tuple>

#include "kvxfer/codec.h"
#include "kvxfer/status.h"

namespace kvxfer::bindings {

using EncodingTuple = std::tuple<std::string, std::string, uint16_t>;  // scheme, scale, group

template <class Enum>
Enum from_name(const std::string& name, uint32_t count, const char* (*name_of)(Enum),
               const char* what) {
  std::string known;
  for (uint32_t i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    if (name == name_of(value)) return value;
    known += (i == 0 ? "" : ", ") + std::string(name_of(value));
  }
  throw Error(StatusCode::kInvalid,
              std::string(what) + " \"" + name + "\" is unknown; there are " + known);
}

inline Encoding to_encoding(const EncodingTuple& encoding) {
  const auto& [scheme, scale, group] = encoding;
  return {from_name(scheme, kNumSchemes, &scheme_name, "scheme"),
          from_name(scale, kNumScaleFormats, &scale_format_name, "scale format"), group};
}

}  // namespace kvxfer::bindings

#endif  // KVXFER_BINDINGS_ENCODING_H_

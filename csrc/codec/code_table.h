#ifndef KVXFER_CODEC_CODE_TABLE_H_
#define KVXFER_CODEC_CODE_TABLE_H_

#include <array>
#include <cstdint>

#include "kvxfer/codec.h"

namespace kvxfer {

// What each byte of an 8-bit float becomes in another cache.
struct CodeTable {
  Stored from;
  Stored to;
  std::array<uint32_t, 256> bits{};  // of an element of `to`
  std::array<Loss, 256> loss{};
  bool lossless = true;

  CodeTable(const Stored& from, const Stored& to);
};

// Made at the first use and kept by the calling thread for a while: valid until its next call.
const CodeTable& code_table(const Stored& from, const Stored& to);

}  // namespace kvxfer

#endif  // KVXFER_CODEC_CODE_TABLE_H_

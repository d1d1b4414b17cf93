#ifndef KVXFER_CODEC_CODE_TABLE_H_
#define KVXFER_CODEC_CODE_TABLE_H_

#include <array>
#include <cstdint>

#include "kvxfer/codec.h"

namespace kvxfer {

// What each byte of an 8-bit float becomes in another cache. Making one takes microseconds.
struct CodeTable {
  std::array<uint32_t, 256> bits{};  // of an element of `to`
  std::array<bool, 256> clamped{};
  std::array<bool, 256> inexact{};
  bool lossless = true;

  CodeTable(const Stored& from, const Stored& to);
};

}  // namespace kvxfer

#endif  // KVXFER_CODEC_CODE_TABLE_H_

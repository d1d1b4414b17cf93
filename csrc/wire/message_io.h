#ifndef KVXFER_WIRE_MESSAGE_IO_H_
#define KVXFER_WIRE_MESSAGE_IO_H_

#include <bit>
#include <vector>

#include "base/byte_io.h"
#include "wire/messages.h"

// What the coding of several messages shares.
namespace kvxfer::wire {

inline ByteWriter begin(MessageType type) {
  ByteWriter out;
  out.put(static_cast<uint8_t>(type));
  return out;
}

inline void put_floats(ByteWriter& out, const std::vector<float>& values) {
  out.put(static_cast<uint32_t>(values.size()));
  for (float value : values) out.put(std::bit_cast<uint32_t>(value));
}

inline std::vector<float> get_floats(ByteReader& in) {
  std::vector<float> values;
  for (uint32_t bits : in.get_list(kMaxScales)) values.push_back(std::bit_cast<float>(bits));
  return values;
}

}  // namespace kvxfer::wire

#endif  // KVXFER_WIRE_MESSAGE_IO_H_

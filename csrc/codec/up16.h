#ifndef KVXFER_CODEC_UP16_H_
#define KVXFER_CODEC_UP16_H_

#include <cstdint>

namespace kvxfer {

// Parts of a coded chunk are filled up to this many bytes.
constexpr uint64_t up16(uint64_t bytes) { return (bytes + 15) / 16 * 16; }

}  // namespace kvxfer

#endif  // KVXFER_CODEC_UP16_H_

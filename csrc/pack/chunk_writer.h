#ifndef KVXFER_PACK_CHUNK_WRITER_H_
#define KVXFER_PACK_CHUNK_WRITER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pack/stream_digest.h"

namespace kvxfer {

// Writes what is behind a chunk's header, in order, and digests it while it is in the cache. With
// `stream` it is made in a small buffer and goes from there past the caches: encoding straight into
// `wire` would first read every line of it from memory.
class ChunkWriter {
 public:
  ChunkWriter(std::byte* wire, size_t header_bytes, bool with_digest, bool stream)
      : wire_(wire), at_(header_bytes), stream_(stream), digest_(wire, header_bytes, with_digest) {}

  // Room for the next `bytes`. Valid until put().
  std::byte* room(size_t bytes) {
    if (!stream_) return wire_ + at_;
    if (lines_.size() * kStripe < held_ + bytes) lines_.resize((held_ + bytes) / kStripe + 1);
    return buffer() + held_;
  }

  // They are there.
  void put(size_t bytes);

  uint64_t bytes() const { return at_; }

  // The header, whole stripes, is in `wire`.
  Digest finish(uint64_t seed);

 private:
  struct alignas(kStripe) Line {
    std::array<std::byte, kStripe> bytes;
  };

  std::byte* buffer() { return lines_.data()->bytes.data(); }

  std::byte* const wire_;
  uint64_t at_;
  const bool stream_;
  StreamDigest digest_;
  std::vector<Line> lines_;
  size_t held_ = 0;  // bytes in lines_ that are not in `wire`: less than a stripe between put()s
};

}  // namespace kvxfer

#endif  // KVXFER_PACK_CHUNK_WRITER_H_

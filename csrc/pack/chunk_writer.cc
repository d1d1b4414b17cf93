#include "pack/chunk_writer.h"

#include <algorithm>
#include <cstring>

namespace kvxfer {

void ChunkWriter::put(size_t bytes) {
  at_ += bytes;
  if (!stream_) return digest_.digest_to(at_);
  held_ += bytes;
  const size_t whole = held_ / kStripe * kStripe;
  if (whole == 0) return;
  digest_.stream(buffer(), whole / kStripe, wire_ + at_ - held_);
  held_ -= whole;
  std::memcpy(buffer(), buffer() + whole, held_);
}

Digest ChunkWriter::finish(uint64_t seed) {
  if (held_ > 0) std::memcpy(wire_ + at_ - held_, buffer(), held_);
  return digest_.finish(at_, seed);
}

}  // namespace kvxfer

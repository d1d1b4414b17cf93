#ifndef KVXFER_PACK_MOVER_H_
#define KVXFER_PACK_MOVER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/digest_kernels.h"
#include "kvxfer/copy_plan.h"
#include "kvxfer/digest.h"

namespace kvxfer {

enum class Direction { kGather, kScatter };  // runs to wire, wire to runs

// Moves one chunk between the runs of a plan and a contiguous wire buffer. Runs of whole stripes go
// through the SIMD kernels, which digest what they move. Any others are moved piece by piece and
// digested on the wire buffer afterwards, while it is in the cache. Used once, by one thread.
template <Direction kDirection>
class Mover {
 public:
  using Wire = std::conditional_t<kDirection == Direction::kGather, std::byte*, const std::byte*>;

  // `stream` writes past the caches.
  Mover(Wire wire, bool with_digest, bool stream);

  Digest run(const CopyPlan& plan, uint64_t begin, uint64_t end, uint64_t seed);

 private:
  // Segments behind the one being moved whose sources are prefetched.
  static constexpr size_t kAhead = 16;
  static constexpr size_t kCapacity = 128;

  void add_run(const Run& run);
  void add_piece(std::byte* memory, size_t bytes);
  void move_segments(size_t count);
  void flush();
  void move_pieces(const Run& run);
  void move_piece(std::byte* memory, size_t bytes);
  void digest_moved();

  const StripeKernels& kernels_;
  const Wire wire_;
  const bool with_digest_;
  const bool stream_;
  uint64_t at_ = 0;        // wire bytes taken up by segments or moved
  uint64_t digested_ = 0;  // wire bytes in state_, or in segments_
  DigestState state_;
  size_t held_ = 0;
  std::array<Segment, kCapacity + kAhead> segments_;
};

extern template class Mover<Direction::kGather>;
extern template class Mover<Direction::kScatter>;

}  // namespace kvxfer

#endif  // KVXFER_PACK_MOVER_H_

#ifndef KVXFER_TRANSPORT_VERBS_ADDRESS_H_
#define KVXFER_TRANSPORT_VERBS_ADDRESS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "transport/verbs/rail.h"

namespace kvxfer::ibv {

constexpr uint32_t kNoticeBytes = 256;  // that one SEND carries, header included

struct QpAddress {
  uint32_t number = 0;  // 24 bits
  uint32_t psn = 0;     // 24 bits: the first one that it sends
};

// What one side of a connection tells the other about itself.
struct RailAddress {
  std::string name;
  bool ethernet = true;
  uint16_t lid = 0;
  uint8_t mtu = 0;               // code
  uint32_t mbit_per_second = 0;  // 0: unknown
  std::vector<PortGid> gids;
  std::vector<QpAddress> qps;
  std::vector<uint32_t> rkeys;  // of the arena, piece by piece
};

struct EndpointAddress {
  uint64_t arena_base = 0;   // as remote address
  uint64_t arena_bytes = 0;  // 0: has none
  uint64_t piece_bytes = 0;
  std::vector<RailAddress> rails;

  std::vector<std::byte> encode() const;
  // From bytes that may be anything. Throws Error(kProtocol).
  static EndpointAddress decode(std::span<const std::byte> bytes);
};

// One queue pair of each side, to be connected with each other.
struct PathChoice {
  size_t reader_rail = 0, reader_qp = 0;
  size_t writer_rail = 0, writer_qp = 0;
  GidChoice gids;  // first: the reader's, second: the writer's
};

// Who is connected with whom. Both sides come to the same result: each rail gets a partner that
// reaches it, the least used one first, then the one nearest by address, until all queue pairs of a
// side are used up. Empty: nobody reaches anybody.
std::vector<PathChoice> choose_paths(const EndpointAddress& reader, const EndpointAddress& writer);

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_ADDRESS_H_

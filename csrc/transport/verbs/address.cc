#include "transport/verbs/address.h"

#include <algorithm>
#include <optional>
#include <tuple>

#include "base/byte_io.h"
#include "kvxfer/status.h"

namespace kvxfer::ibv {
namespace {

constexpr uint32_t kMagic = 0x3156564b;  // "KVV1": another layout gets another one
constexpr uint32_t kMaxRails = 16;
constexpr uint32_t kMaxGids = 256;
constexpr uint32_t kMaxQps = 64;
constexpr uint32_t kMaxPieces = 1u << 16;
constexpr uint32_t kMaxName = 128;
constexpr uint32_t k24Bits = 0xffffff;

[[noreturn]] void malformed(const std::string& what) {
  throw Error(StatusCode::kProtocol, "the peer's verbs address is malformed: " + what);
}

RailAddress decode_rail(ByteReader& reader, uint64_t pieces) {
  RailAddress rail;
  rail.name = reader.get_string(kMaxName);
  const auto ethernet = reader.get<uint8_t>();
  if (ethernet > 1) malformed("a link layer of number " + std::to_string(ethernet));
  rail.ethernet = ethernet != 0;
  rail.lid = reader.get<uint16_t>();
  rail.mtu = reader.get<uint8_t>();
  rail.mbit_per_second = reader.get<uint32_t>();
  if (mtu_bytes(rail.mtu) == 0) malformed("MTU code " + std::to_string(rail.mtu));
  const auto gids = reader.get<uint32_t>();
  reader.check_count(gids, kMaxGids, "a GID table", 18);
  for (uint32_t i = 0; i < gids; ++i) {
    PortGid gid;
    gid.index = reader.get<uint8_t>();
    gid.type = reader.get<uint8_t>();
    for (uint8_t& byte : gid.bytes) byte = reader.get<uint8_t>();
    rail.gids.push_back(gid);
  }
  const auto qps = reader.get<uint32_t>();
  reader.check_count(qps, kMaxQps, "a list of queue pairs", 8);
  for (uint32_t i = 0; i < qps; ++i) {
    const auto number = reader.get<uint32_t>();
    const auto psn = reader.get<uint32_t>();
    if (number > k24Bits || psn > k24Bits) malformed("a queue pair number or PSN over 24 bits");
    rail.qps.push_back({number, psn});
  }
  rail.rkeys = reader.get_list(kMaxPieces);
  if (rail.rkeys.size() != pieces) {
    malformed(std::to_string(rail.rkeys.size()) + " keys for " + std::to_string(pieces) +
              " pieces of its arena");
  }
  return rail;
}

}  // namespace

std::vector<std::byte> EndpointAddress::encode() const {
  ByteWriter out;
  out.put(kMagic);
  out.put(arena_base);
  out.put(arena_bytes);
  out.put(piece_bytes);
  out.put(static_cast<uint32_t>(rails.size()));
  for (const RailAddress& rail : rails) {
    out.put_string(rail.name);
    out.put(static_cast<uint8_t>(rail.ethernet));
    out.put(rail.lid);
    out.put(rail.mtu);
    out.put(rail.mbit_per_second);
    out.put(static_cast<uint32_t>(rail.gids.size()));
    for (const PortGid& gid : rail.gids) {
      out.put(gid.index);
      out.put(gid.type);
      for (uint8_t byte : gid.bytes) out.put(byte);
    }
    out.put(static_cast<uint32_t>(rail.qps.size()));
    for (const QpAddress& qp : rail.qps) {
      out.put(qp.number);
      out.put(qp.psn);
    }
    out.put_list(rail.rkeys);
  }
  return out.take();
}

EndpointAddress EndpointAddress::decode(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  if (reader.get<uint32_t>() != kMagic) malformed("it does not begin with KVV1");
  EndpointAddress address;
  address.arena_base = reader.get<uint64_t>();
  address.arena_bytes = reader.get<uint64_t>();
  address.piece_bytes = reader.get<uint64_t>();
  uint64_t pieces = 0;
  if (address.arena_bytes != 0) {
    if (address.piece_bytes == 0 || address.arena_base + address.arena_bytes < address.arena_base) {
      malformed("an impossible arena");
    }
    pieces = (address.arena_bytes - 1) / address.piece_bytes + 1;
  }
  const auto rails = reader.get<uint32_t>();
  reader.check_count(rails, kMaxRails, "a list of rails", 20);
  for (uint32_t i = 0; i < rails; ++i) address.rails.push_back(decode_rail(reader, pieces));
  reader.expect_end();
  return address;
}

std::vector<PathChoice> choose_paths(const EndpointAddress& reader, const EndpointAddress& writer) {
  std::vector<PathChoice> paths;
  std::vector<size_t> reader_used(reader.rails.size()), writer_used(writer.rails.size());
  for (bool found = true; found;) {
    found = false;
    for (size_t i = 0; i < reader.rails.size(); ++i) {
      const RailAddress& ours = reader.rails[i];
      if (reader_used[i] == ours.qps.size()) continue;
      std::optional<PathChoice> best;
      std::tuple<size_t, int> best_score;
      for (size_t j = 0; j < writer.rails.size(); ++j) {
        const RailAddress& theirs = writer.rails[j];
        if (writer_used[j] == theirs.qps.size() || ours.ethernet != theirs.ethernet) continue;
        const auto gids = choose_gids(ours.gids, theirs.gids);
        if (!gids) continue;
        const std::tuple<size_t, int> score{writer_used[j], -gids->common_bits};
        if (best && score >= best_score) continue;
        best = PathChoice{i, reader_used[i], j, writer_used[j], *gids};
        best_score = score;
      }
      if (!best) continue;
      ++reader_used[i];
      ++writer_used[best->writer_rail];
      paths.push_back(*best);
      found = true;
    }
  }
  return paths;
}

}  // namespace kvxfer::ibv

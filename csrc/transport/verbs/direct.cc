#include "transport/verbs/direct.h"

#include <algorithm>
#include <string>

#include "base/byte_io.h"
#include "kvxfer/status.h"

namespace kvxfer::ibv {
namespace {

constexpr uint32_t kMagic = 0x3144564b;  // "KVD1": another layout gets another one
constexpr uint32_t kMaxRegions = 1u << 16;
constexpr uint32_t kMaxKeys = 1u << 18;  // of one rail

[[noreturn]] void malformed(const std::string& what) {
  throw Error(StatusCode::kProtocol, "the peer's keys are malformed: " + what);
}

uint64_t pieces_of(uint64_t bytes, uint64_t piece_bytes) { return (bytes - 1) / piece_bytes + 1; }

}  // namespace

std::vector<std::byte> LocalMemory::keys() const {
  ByteWriter out;
  const std::byte* base = parts_.front()->memory().data();
  out.put(kMagic);
  out.put(parts_.front()->remote_address());
  out.put(parts_.front()->piece_bytes());
  out.put(static_cast<uint32_t>(parts_.size()));
  for (const auto& part : parts_) {
    out.put(static_cast<uint64_t>(part->memory().data() - base));
    out.put(static_cast<uint64_t>(part->memory().size()));
  }
  for (const size_t nic : nic_of_rail_) {
    std::vector<uint32_t> all;
    for (const auto& part : parts_) {
      const auto keys = part->rkeys(nic);
      all.insert(all.end(), keys.begin(), keys.end());
    }
    out.put_list(all);
  }
  return out.take();
}

const VerbsMemory* LocalMemory::find(const std::byte* address) const {
  const auto after = std::upper_bound(
      parts_.begin(), parts_.end(), address,
      [](const std::byte* at, const auto& part) { return at < part->memory().data(); });
  if (after == parts_.begin()) return nullptr;
  const VerbsMemory& part = **std::prev(after);
  return address < part.memory().data() + part.memory().size() ? &part : nullptr;
}

bool LocalMemory::holds(const std::byte* address, uint64_t bytes) const {
  while (const VerbsMemory* part = find(address)) {
    const auto left =
        static_cast<uint64_t>(part->memory().data() + part->memory().size() - address);
    if (bytes <= left) return true;
    address += left;
    bytes -= left;
  }
  return false;
}

void LocalMemory::check_registered(const std::byte* address, uint64_t bytes) const {
  if (!holds(address, bytes)) throw Error(StatusCode::kInvalid, "bytes that are not registered");
}

void LocalMemory::put(size_t adapter, std::byte* to, std::span<const std::byte> bytes,
                      double seconds) const {
  check_registered(to, bytes.size());
  while (!bytes.empty()) {
    const VerbsMemory& part = part_of(to);
    const auto now = bytes.first(std::min<uint64_t>(bytes.size(), part.piece_left(to)));
    loopbacks_->put(adapter, part.remote_address(to), part.rkey(adapter, to), now, seconds);
    bytes = bytes.subspan(now.size());
    to += now.size();
  }
}

void LocalMemory::get(size_t adapter, const std::byte* from, std::span<std::byte> bytes,
                      double seconds) const {
  check_registered(from, bytes.size());
  while (!bytes.empty()) {
    const VerbsMemory& part = part_of(from);
    const auto now = bytes.first(std::min<uint64_t>(bytes.size(), part.piece_left(from)));
    loopbacks_->get(adapter, part.remote_address(from), part.lkey(adapter, from), now, seconds);
    bytes = bytes.subspan(now.size());
    from += now.size();
  }
}

Target::Target(const EndpointAddress& address)
    : base_(address.arena_base), piece_bytes_(address.piece_bytes) {
  if (address.arena_bytes > 0) regions_.push_back({0, address.arena_bytes, 0});
  for (const RailAddress& rail : address.rails) rkeys_.push_back(rail.rkeys);
}

Target::Target(std::span<const std::byte> keys, size_t rails) {
  ByteReader reader(keys);
  if (reader.get<uint32_t>() != kMagic) malformed("they do not begin with KVD1");
  base_ = reader.get<uint64_t>();
  piece_bytes_ = reader.get<uint64_t>();
  if (piece_bytes_ == 0) malformed("pieces of no bytes");
  const auto count = reader.get<uint32_t>();
  reader.check_count(count, kMaxRegions, "a list of regions", 2 * sizeof(uint64_t));
  uint64_t end = 0;
  uint64_t pieces = 0;
  for (uint32_t i = 0; i < count; ++i) {
    Region region;
    region.offset = reader.get<uint64_t>();
    region.bytes = reader.get<uint64_t>();
    region.first_key = pieces;
    if (region.bytes == 0 || region.offset < end ||
        region.bytes > UINT64_MAX - base_ - region.offset || region.offset > UINT64_MAX - base_) {
      malformed("impossible regions");
    }
    end = region.offset + region.bytes;
    const uint64_t more = pieces_of(region.bytes, piece_bytes_);
    if (more > kMaxKeys || pieces + more > kMaxKeys) malformed("more keys than there can be");
    pieces += more;
    regions_.push_back(region);
  }
  for (size_t rail = 0; rail < rails; ++rail) {
    rkeys_.push_back(reader.get_list(kMaxKeys));
    if (rkeys_.back().size() != pieces) {
      malformed(std::to_string(rkeys_.back().size()) + " keys for " + std::to_string(pieces) +
                " pieces");
    }
  }
  reader.expect_end();
}

const Target::Region* Target::find(uint64_t offset) const {
  const auto after =
      std::upper_bound(regions_.begin(), regions_.end(), offset,
                       [](uint64_t at, const Region& region) { return at < region.offset; });
  return after == regions_.begin() ? nullptr : &*std::prev(after);
}

bool Target::holds(uint64_t offset, uint64_t bytes) const {
  while (const Region* region = find(offset)) {
    const uint64_t into = offset - region->offset;
    if (into >= region->bytes) return false;
    const uint64_t left = region->bytes - into;
    if (bytes <= left) return true;
    offset += left;
    bytes -= left;
  }
  return false;
}

}  // namespace kvxfer::ibv

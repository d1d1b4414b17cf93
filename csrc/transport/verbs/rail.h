#ifndef KVXFER_TRANSPORT_VERBS_RAIL_H_
#define KVXFER_TRANSPORT_VERBS_RAIL_H_

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kvxfer/verbs.h"
#include "transport/verbs/affinity.h"
#include "transport/verbs/handle.h"
#include "transport/verbs/library.h"

namespace kvxfer::ibv {

// One opened adapter with a protection domain of ours. Immutable; its objects may be used by any
// thread.
struct Nic {
  std::shared_ptr<const Library> library;
  std::string name;
  Place place;
  DeviceAttr attr{};
  Handle<Context> context;
  Handle<Pd> pd;
};

using GidBytes = std::array<uint8_t, 16>;

struct PortGid {
  uint8_t index = 0;
  uint8_t type = 0;  // GidType
  GidBytes bytes{};
};

uint32_t mbit_per_second(const PortAttr& attr);

// One port that may be used. Immutable.
struct Rail {
  std::shared_ptr<Nic> nic;
  size_t nic_index = 0;  // among the fabric's adapters
  uint8_t port = 0;
  PortAttr attr{};  // when it was opened
  std::vector<PortGid> gids;

  std::string name() const { return nic->name + ":" + std::to_string(port); }
  bool active() const;  // asks the port
  uint32_t mbit_per_second() const { return ibv::mbit_per_second(attr); }
};

struct Rails {
  std::vector<std::shared_ptr<Nic>> nics;
  std::vector<Rail> rails;
  std::string nearness;  // of the rails to what they were chosen for: " nearest to ..."
};

// Opens the adapters that the options name, or all that have an active port; of those the nearest
// ones, where the options say to what. Throws
// Error(kNoResources) or Error(kInvalid).
Rails open_rails(const VerbsOptions& options);

// Which pair of addresses two ports talk over, if any: RoCE v2 before v1, routable before
// link-local, then the longest common prefix, which is the same subnet where there is one. Both
// sides get the same answer when they name the same side first.
struct GidChoice {
  size_t first = 0;  // positions in the two lists
  size_t second = 0;
  int common_bits = 0;
};
std::optional<GidChoice> choose_gids(const std::vector<PortGid>& first,
                                     const std::vector<PortGid>& second);

std::string gid_text(const PortGid& gid);  // "RoCE v2 ::ffff:10.0.0.1"
uint32_t mtu_bytes(uint32_t code);

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_RAIL_H_

#include "transport/verbs/nearest.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace kvxfer::ibv {
namespace {

int nearest_distance(const std::vector<Rail>& rails, const Place& place) {
  int nearest = std::numeric_limits<int>::max();
  for (const Rail& rail : rails) nearest = std::min(nearest, distance(rail.nic->place, place));
  return nearest;
}

template <typename Keep>
void keep_rails(Rails& all, Keep keep) {
  Rails kept;
  for (Rail& rail : all.rails) {
    if (!keep(rail)) continue;
    const auto known = std::find(kept.nics.begin(), kept.nics.end(), rail.nic);
    rail.nic_index = static_cast<size_t>(known - kept.nics.begin());
    if (known == kept.nics.end()) kept.nics.push_back(rail.nic);
    kept.rails.push_back(std::move(rail));
  }
  all = std::move(kept);
}

// Near ports are of no use where they are slow ones, as those are by which a host is managed.
// Returns what was left out.
std::vector<Rail> drop_slow(Rails& all) {
  std::vector<Rail> slow;
  uint32_t fastest = 0;
  for (const Rail& rail : all.rails) fastest = std::max(fastest, rail.mbit_per_second());
  keep_rails(all, [&](const Rail& rail) {
    const uint32_t speed = rail.mbit_per_second();
    const bool fast = speed == 0 || speed >= fastest / 2;
    if (!fast) slow.push_back(rail);
    return fast;
  });
  return slow;
}

}  // namespace

void keep_first(Rails& all, size_t most) {
  if (all.rails.size() <= most) return;
  std::string nearness = std::move(all.nearness);
  size_t count = 0;
  keep_rails(all, [&](const Rail&) { return count++ < most; });
  all.nearness = std::move(nearness);
}

std::optional<Place> named_place(const VerbsOptions& options) {
  if (options.near_to.empty()) return std::nullopt;
  return place_named(options.sysfs, options.near_to);
}

void keep_nearest(Rails& all, const std::optional<Place>& place, const VerbsOptions& options) {
  std::vector<std::pair<std::string, Place>> places;
  std::vector<Rail> slow;
  if (place) {
    places.emplace_back(options.near_to, *place);
  } else {
    for (const std::string& address : options.gpus) {
      Place gpu = place_of_device(options.sysfs, address);
      if (gpu.pci.empty()) {
        all.nearness =
            ", chosen from all ports: " +
            (address.empty() ? "the PCI address of a GPU is not known"
                             : options.sysfs + "/bus/pci/devices does not show the GPU " + address);
        return;
      }
      places.emplace_back("GPU " + address, std::move(gpu));
    }
    if (places.empty()) return;
    slow = drop_slow(all);
  }
  std::string nearness;
  std::vector<int> nearest;
  for (const auto& [name, at] : places) {
    nearest.push_back(nearest_distance(all.rails, at));
    nearness += (nearness.empty() ? " nearest to " : ", and to ") + name + ", " +
                distance_text(nearest.back());
    for (const Rail& rail : slow) {
      if (distance(rail.nic->place, at) >= nearest.back()) continue;
      nearness += " (" + rail.name() + " is nearer, but slow)";
    }
  }
  keep_rails(all, [&](const Rail& rail) {
    for (size_t i = 0; i < places.size(); ++i) {
      if (distance(rail.nic->place, places[i].second) == nearest[i]) return true;
    }
    return false;
  });
  all.nearness = std::move(nearness);
}

}  // namespace kvxfer::ibv

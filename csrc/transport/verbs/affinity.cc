#include "transport/verbs/affinity.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <regex>

#include "kvxfer/status.h"

namespace kvxfer::ibv {
namespace {

namespace fs = std::filesystem;

constexpr int kSameBridge = 100, kSameNode = 200, kElsewhere = 300;
constexpr const char* kNumaPrefix = "numa:";

// How sysfs writes an address: "0000:c1:00.0", and more digits in front for buses of their own.
// Empty: it is none.
std::string sysfs_address(const std::string& text) {
  static const std::regex kShape("0*([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\\.[0-7])",
                                 std::regex::icase);
  std::smatch found;
  if (!std::regex_match(text, found, kShape)) return "";
  std::string address = found[1];
  std::transform(address.begin(), address.end(), address.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return address;
}

Place place_of(const fs::path& device) {
  Place place;
  std::error_code error;
  const fs::path real = fs::canonical(device, error);
  if (error) return place;
  for (const fs::path& part : real) {
    const std::string name = part.string();
    if (name.starts_with("pci") && name.find(':') != std::string::npos) {
      place.pci = {name};
    } else if (!place.pci.empty() && !sysfs_address(name).empty()) {
      place.pci.push_back(name);
    }
  }
  std::ifstream(real / "numa_node") >> place.numa_node;
  return place;
}

}  // namespace

Place place_of_adapter(const std::string& sysfs, const std::string& name) {
  return place_of(fs::path(sysfs) / "class" / "infiniband" / name / "device");
}

Place place_of_device(const std::string& sysfs, const std::string& address) {
  const std::string name = sysfs_address(address);
  return name.empty() ? Place() : place_of(fs::path(sysfs) / "bus" / "pci" / "devices" / name);
}

Place place_named(const std::string& sysfs, const std::string& text) {
  Place place;
  const std::string prefix = kNumaPrefix;
  if (text.starts_with(prefix)) {
    const char* end = text.data() + text.size();
    const auto read = std::from_chars(text.data() + prefix.size(), end, place.numa_node);
    if (read.ec == std::errc() && read.ptr == end && place.numa_node >= 0) return place;
  } else if (const std::string address = sysfs_address(text); !address.empty()) {
    place = place_of_device(sysfs, address);
    if (!place.pci.empty()) return place;
    throw Error(StatusCode::kInvalid, "there is no PCI device " + address + " in " + sysfs +
                                          "/bus/pci/devices to choose RDMA ports near to");
  }
  throw Error(
      StatusCode::kInvalid,
      "'" + text +
          "' names no place to choose RDMA ports near to: give the PCI address of "
          "a device, as 0000:c1:00.0, or a NUMA node, as numa:1 (verbs_near may also be gpu, "
          "for the GPUs that hold caches, or any, for all ports)");
}

int distance(const Place& a, const Place& b) {
  const auto differ = std::mismatch(a.pci.begin(), a.pci.end(), b.pci.begin(), b.pci.end());
  const auto common = differ.first - a.pci.begin();
  if (common > 1) {
    const auto apart = (a.pci.end() - differ.first) + (b.pci.end() - differ.second);
    return std::min(static_cast<int>(apart), kSameBridge - 1);
  }
  if (common == 1) return kSameBridge;
  return a.numa_node >= 0 && a.numa_node == b.numa_node ? kSameNode : kElsewhere;
}

std::string distance_text(int distance) {
  if (distance < kSameBridge) return "on the same PCIe switch";
  if (distance == kSameBridge) return "on the same host bridge";
  return distance == kSameNode ? "on the same NUMA node" : "not on its NUMA node";
}

}  // namespace kvxfer::ibv

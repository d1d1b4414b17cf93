#include "transport/verbs/affinity.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <fstream>

#include "kvxfer/status.h"

namespace kvxfer::ibv {
namespace {

namespace fs = std::filesystem;

constexpr int kSameBridge = 100, kSameNode = 200, kElsewhere = 300;
constexpr const char* kNumaPrefix = "numa:";

// "0000:c1:00.0"
bool is_pci_address(const std::string& text) {
  constexpr const char* kShape = "xxxx:xx:xx.x";
  return text.size() == 12 && std::equal(text.begin(), text.end(), kShape, [](char c, char shape) {
           return shape == 'x' ? std::isxdigit(static_cast<unsigned char>(c)) != 0 : c == shape;
         });
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
    } else if (!place.pci.empty() && is_pci_address(name)) {
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

Place place_named(const std::string& sysfs, const std::string& text) {
  Place place;
  const std::string prefix = kNumaPrefix;
  if (text.starts_with(prefix)) {
    const char* end = text.data() + text.size();
    const auto read = std::from_chars(text.data() + prefix.size(), end, place.numa_node);
    if (read.ec == std::errc() && read.ptr == end && place.numa_node >= 0) return place;
  } else if (text.size() == 12) {
    std::string lower = text;  // GPU runtimes write capitals
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (is_pci_address(lower)) {
      place = place_of(fs::path(sysfs) / "bus" / "pci" / "devices" / lower);
      if (!place.pci.empty()) return place;
      throw Error(StatusCode::kInvalid, "there is no PCI device " + lower + " in " + sysfs +
                                            "/bus/pci/devices to choose RDMA ports near to");
    }
  }
  throw Error(StatusCode::kInvalid,
              "'" + text +
                  "' names no place to choose RDMA ports near to: give the PCI address of "
                  "a device, as 0000:c1:00.0, or a NUMA node, as numa:1");
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

#ifndef KVXFER_TRANSPORT_VERBS_AFFINITY_H_
#define KVXFER_TRANSPORT_VERBS_AFFINITY_H_

#include <string>
#include <vector>

namespace kvxfer::ibv {

// Where a device sits in this host, as far as sysfs says.
struct Place {
  std::vector<std::string> pci;  // host bridge, root port, switches, the device; may be empty
  int numa_node = -1;            // -1: unknown

  std::string address() const { return pci.empty() ? "" : pci.back(); }
};

// `sysfs`: "/sys", or a copy of what is used of it. Nothing is thrown: what is not found is
// unknown.
Place place_of_adapter(const std::string& sysfs, const std::string& name);

// Of a device on the PCI bus, by its address in any form that GPU runtimes and tools write:
// "0000:c1:00.0", "0000:C1:00.0", "00000000:C1:00.0".
Place place_of_device(const std::string& sysfs, const std::string& address);

// Such an address, or "numa:1". Throws Error(kInvalid) for anything else,
// and for a device that is not there.
Place place_named(const std::string& sysfs, const std::string& text);

// How far apart two are, smaller being nearer: on a common PCIe switch or root port, by how many
// bridges lie between; on one host bridge; on one NUMA node; elsewhere, or unknown.
int distance(const Place& a, const Place& b);
std::string distance_text(int distance);

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_AFFINITY_H_

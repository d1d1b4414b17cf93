#ifndef KVXFER_TESTS_VERBS_WORLD_H_
#define KVXFER_TESTS_VERBS_WORLD_H_

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fake_verbs.h"
#include "kvxfer/verbs.h"

// The adapters that tests of the verbs transport run over.
namespace kvxfer::testing {

inline std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts{""};
  for (const char c : text) {
    if (c == at) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

// Real devices, when KVXFER_TEST_VERBS names them: "rxe0,rxe2/rxe1,rxe3", the consumer's and the
// producer's. Else null, and tests run over the fake ones.
inline const char* real_devices() { return std::getenv("KVXFER_TEST_VERBS"); }

// How often something is done: soft-RoCE is slow, and so are the machines that have it.
inline uint32_t times(uint32_t count) { return real_devices() ? (count + 9) / 10 : count; }

// Two hosts, "c" and "p", with two adapters each; the second ones are in a subnet of their own.
inline std::vector<fake_verbs::Device> two_hosts() {
  std::vector<fake_verbs::Device> devices;
  const std::string names[] = {"c0", "c1", "p0", "p1"};
  for (int i = 0; i < 4; ++i) {
    const std::string subnet = std::to_string(i % 2), host = std::to_string(i / 2 + 1);
    fake_verbs::Port port;
    port.gids.push_back({1, "fe80::" + std::to_string(i + 1)});
    port.gids.push_back({2, "fe80::" + std::to_string(i + 1)});
    port.gids.push_back({1, "::ffff:10.0." + subnet + "." + host});
    port.gids.push_back({2, "::ffff:10.0." + subnet + "." + host});
    fake_verbs::Device device;
    device.name = names[i];
    device.ports.push_back(port);
    devices.push_back(device);
  }
  return devices;
}

inline std::vector<fake_verbs::Device> two_hosts_with(
    const std::function<void(fake_verbs::Device&)>& change) {
  auto devices = two_hosts();
  for (auto& device : devices) change(device);
  return devices;
}

inline VerbsOptions options_for(bool consumer) {
  VerbsOptions options;
  if (const char* real = real_devices()) {
    options.devices = split(split(real, '/').at(consumer ? 0 : 1), ',');
  } else {
    options.library = fake_verbs::library_path();
    options.devices =
        consumer ? std::vector<std::string>{"c0", "c1"} : std::vector<std::string>{"p0", "p1"};
  }
  return options;
}

inline VerbsOptions one_rail(bool consumer) {
  VerbsOptions options = options_for(consumer);
  options.devices.resize(1);
  return options;
}

// Forgets faults; the devices are the two hosts' unless others are given.
inline void reset_world(std::vector<fake_verbs::Device> devices = two_hosts()) {
  if (!real_devices()) fake_verbs::reset(std::move(devices));
}

}  // namespace kvxfer::testing

#endif  // KVXFER_TESTS_VERBS_WORLD_H_

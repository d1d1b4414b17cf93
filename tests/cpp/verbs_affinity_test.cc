// Which rails are near to a buffer's device, in copies of the parts of /sys that say so.

#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "kvxfer/status.h"
#include "transport/verbs/affinity.h"
#include "transport/verbs/rail.h"
#include "verbs_pair.h"

namespace kvxfer::testing {
namespace {

namespace fs = std::filesystem;

// A host with two processors, two host bridges each, and below each bridge two switches with a GPU
// and an adapter, as GPU servers have them: adapter i is 0000:i3:00.0, GPU i 0000:i4:00.0.
class Sysfs {
 public:
  Sysfs() {
    std::string name = (fs::temp_directory_path() / "kvxfer-sysfs.XXXXXX").string();
    root_ = ::mkdtemp(name.data());
    for (int i = 0; i < 8; ++i) {
      const std::string n = std::to_string(i);
      const std::string bridge = "pci0000:" + std::to_string(i / 2) + "0";
      const std::string port = "0000:" + std::to_string(i / 2) + "0:0" + std::to_string(i % 2 + 1);
      const std::string above = bridge + "/" + port + ".0/0000:" + n + "1:00.0/0000:" + n + "2:0";
      add(above + "0.0/0000:" + n + "3:00.0", i / 4, "class/infiniband/a" + n + "/device");
      add(above + "1.0/0000:" + n + "4:00.0", i / 4, "bus/pci/devices/0000:" + n + "4:00.0");
    }
  }
  ~Sysfs() { fs::remove_all(root_); }
  Sysfs(const Sysfs&) = delete;
  Sysfs& operator=(const Sysfs&) = delete;

  std::string path() const { return root_.string(); }

  void add(const std::string& device, int node, const std::string& link) {
    const fs::path folder = root_ / "devices" / device;
    fs::create_directories(folder);
    std::ofstream(folder / "numa_node") << node << "\n";
    fs::create_directories((root_ / link).parent_path());
    fs::create_symlink(folder, root_ / link);
  }

 private:
  fs::path root_;
};

std::vector<fake_verbs::Device> eight_adapters() {
  std::vector<fake_verbs::Device> devices;
  for (int i = 0; i < 8; ++i) {
    fake_verbs::Device device;
    device.name = "a" + std::to_string(i);
    fake_verbs::Port port;
    port.gids = {{2, "::ffff:10.0." + std::to_string(i) + ".1"}};
    device.ports.push_back(port);
    devices.push_back(device);
  }
  return devices;
}

std::string names(const std::vector<VerbsRail>& rails) {
  std::string all;
  for (const VerbsRail& rail : rails) all += (all.empty() ? "" : " ") + rail.device;
  return all;
}

TEST_SUITE("verbs affinity" * doctest::skip(real_devices() != nullptr)) {
  TEST_CASE("the nearest ports are used") {
    const Sysfs sysfs;
    VerbsOptions options = options_for(true);
    options.devices.clear();
    options.sysfs = sysfs.path();
    const auto near = [&](const std::string& to) {
      options.near_to = to;
      return names(list_verbs_rails(options));
    };
    reset_world(eight_adapters());
    CHECK(near("") == "a0 a1 a2 a3 a4 a5 a6 a7");
    for (int i = 0; i < 8; ++i) {
      const std::string n = std::to_string(i);
      CHECK(near("0000:" + n + "4:00.0") == "a" + n);
    }
    CHECK(near("numa:0") == "a0 a1 a2 a3");
    CHECK(near("numa:1") == "a4 a5 a6 a7");
    CHECK(near("numa:7") == "a0 a1 a2 a3 a4 a5 a6 a7");

    // A port that is down is no port: the next nearest take its place, bridge, then node, then any.
    fake_verbs::set_port("a5", 1, false);
    CHECK(near("0000:54:00.0") == "a4");
    fake_verbs::set_port("a4", 1, false);
    CHECK(near("0000:54:00.0") == "a6 a7");
    fake_verbs::set_port("a6", 1, false);
    fake_verbs::set_port("a7", 1, false);
    CHECK(near("0000:54:00.0") == "a0 a1 a2 a3");
    reset_world(eight_adapters());

    // Of those that are named.
    options.devices = {"a1", "a2", "a3"};
    CHECK(near("0000:34:00.0") == "a3");
    CHECK(near("0000:04:00.0") == "a1");
    CHECK(near("0000:44:00.0") == "a1 a2 a3");
    options.devices = {"a3"};
    const auto rails = list_verbs_rails(options);
    REQUIRE(rails.size() == 1);
    CHECK(rails[0].pci_address == "0000:33:00.0");
    CHECK(rails[0].numa_node == 0);
  }

  TEST_CASE("the ports nearest to the GPUs that hold caches are used") {
    const Sysfs sysfs;
    VerbsOptions options = options_for(true);
    options.devices.clear();
    options.sysfs = sysfs.path();
    const auto near = [&](const std::vector<std::string>& gpus) {
      options.gpus = gpus;
      return names(list_verbs_rails(options));
    };
    const std::string all = "a0 a1 a2 a3 a4 a5 a6 a7";
    reset_world(eight_adapters());
    CHECK(near({}) == all);
    for (int i = 0; i < 8; ++i) {
      const std::string n = std::to_string(i);
      CHECK(near({"0000:" + n + "4:00.0"}) == "a" + n);
      CHECK(near({"00000000:" + n + "4:00.0"}) == "a" + n);
    }
    CHECK(near({"0000:64:00.0", "0000:14:00.0"}) == "a1 a6");

    // What sysfs does not show, as in containers, is near to nothing: not even beside one that is.
    for (const char* hidden : {"0000:99:00.0", "", "gpu0", "../../../../"}) {
      CAPTURE(hidden);
      CHECK(near({hidden}) == all);
      CHECK(near({"0000:14:00.0", hidden}) == all);
    }

    // What was said by name comes first.
    options.near_to = "0000:04:00.0";
    CHECK(near({"0000:64:00.0"}) == "a0");
    options.near_to = "numa:1";
    CHECK(near({"0000:04:00.0"}) == "a4 a5 a6 a7");
    options.near_to.clear();

    // A port that is down is none.
    fake_verbs::set_port("a6", 1, false);
    CHECK(near({"0000:64:00.0"}) == "a7");
  }

  TEST_CASE("what is near and slow is not used, but for who names it") {
    const Sysfs sysfs;
    auto devices = eight_adapters();
    devices[2].ports[0].speed = 32;  // a quarter of the others'
    devices[3].ports[0].speed = 64;  // half
    devices[4].ports[0].speed = 0;   // says nothing
    reset_world(std::move(devices));
    VerbsOptions options = options_for(true);
    options.devices.clear();
    options.sysfs = sysfs.path();
    options.gpus = {"0000:24:00.0"};
    CHECK(names(list_verbs_rails(options)) == "a3");
    options.gpus = {"0000:34:00.0"};
    CHECK(names(list_verbs_rails(options)) == "a3");
    options.gpus = {"0000:44:00.0"};
    CHECK(names(list_verbs_rails(options)) == "a4");
    CHECK(ibv::open_rails(options).nearness.find("slow") == std::string::npos);
    options.gpus = {"0000:24:00.0"};
    CHECK(ibv::open_rails(options).nearness.find(" (a2:1 is nearer, but slow)") !=
          std::string::npos);
    options.near_to = "0000:24:00.0";
    CHECK(names(list_verbs_rails(options)) == "a2");
  }

  TEST_CASE("the nearest of more ports than there can be rails") {
    Sysfs sysfs;
    std::vector<fake_verbs::Device> devices;
    for (int i = 10; i < 28; ++i) {
      fake_verbs::Device device = eight_adapters()[0];
      const std::string n = std::to_string(i);
      device.name = "b" + n;
      devices.push_back(device);
      sysfs.add("pci0001:" + n + "/0001:" + n + ":00.0", 0, "class/infiniband/b" + n + "/device");
    }
    sysfs.add("pci0001:27/0001:27:01.0", 0, "bus/pci/devices/0001:27:01.0");
    reset_world(std::move(devices));
    VerbsOptions options = options_for(true);
    options.devices.clear();
    options.sysfs = sysfs.path();
    CHECK(list_verbs_rails(options).size() == 16);
    options.gpus = {"0001:27:01.0"};
    CHECK(names(list_verbs_rails(options)) == "b27");
  }

  TEST_CASE("a place is a PCI address or a NUMA node") {
    Sysfs sysfs;
    CHECK(ibv::place_named(sysfs.path(), "0000:04:00.0").pci.size() == 5);
    CHECK(ibv::place_named(sysfs.path(), "numa:3").numa_node == 3);
    for (const char* text : {"numa:", "numa:-1", "numa:1x", "gpu0", "0000:04:00", "0000:0g:00.0",
                             "0000:99:00.0", "../../../../"}) {
      CAPTURE(text);
      CHECK_THROWS_AS(ibv::place_named(sysfs.path(), text), Error);
    }
    // GPU runtimes write it in capitals.
    const std::string link = "bus/pci/devices/0000:ab:00.0";
    sysfs.add("pci0000:a0/0000:ab:00.0", 1, link);
    CHECK(ibv::place_named(sysfs.path(), "0000:AB:00.0").numa_node == 1);
    CHECK(ibv::place_named(sysfs.path(), "00000000:AB:00.0").numa_node == 1);
    // Buses behind a bridge of their own have longer numbers.
    sysfs.add("pci10000:00/10000:01:00.0", 0, "bus/pci/devices/10000:01:00.0");
    CHECK(ibv::place_named(sysfs.path(), "10000:01:00.0").pci.size() == 2);
  }

  TEST_CASE("adapters that sit nowhere are used when none is nearer") {
    const Sysfs sysfs;
    const ibv::Place unknown = ibv::place_of_adapter(sysfs.path(), "rxe0");
    CHECK(unknown.address().empty());
    CHECK(unknown.numa_node == -1);
    const ibv::Place known = ibv::place_named(sysfs.path(), "0000:04:00.0");
    CHECK(ibv::distance(unknown, unknown) == ibv::distance(unknown, known));
    CHECK(ibv::distance(known, known) == 0);
  }

  TEST_CASE("a link says what its rails are near to") {
    const Sysfs sysfs;
    reset_world();
    VerbsOptions consumer = options_for(true);
    consumer.sysfs = sysfs.path();
    consumer.near_to = "numa:0";
    VerbsPair pair(consumer);
    CHECK(pair.consumer->describe().find("nearest to numa:0, not on its NUMA node") !=
          std::string::npos);
    pair.start();
    const Bytes source = random_bytes(1000, 1);
    pair.producer->write(source, 0, {}, 1);
    CHECK(pair.wait_written(1));
  }

  TEST_CASE("a link says for which GPUs its rails are, or why not") {
    const Sysfs sysfs;
    reset_world();
    VerbsOptions consumer = options_for(true);
    consumer.sysfs = sysfs.path();
    consumer.gpus = {"0000:04:00.0", "0000:14:00.0"};
    VerbsOptions producer = options_for(false);
    producer.sysfs = sysfs.path();
    producer.gpus = {"0000:99:00.0"};
    VerbsPair pair(consumer, producer);
    CHECK(
        pair.consumer->describe().find("nearest to GPU 0000:04:00.0, not on its NUMA node, and to "
                                       "GPU 0000:14:00.0") != std::string::npos);
    CHECK(pair.producer->describe().find("2 rails, chosen from all ports: " + sysfs.path() +
                                         "/bus/pci/devices does not show the GPU 0000:99:00.0") !=
          std::string::npos);
  }
}

}  // namespace
}  // namespace kvxfer::testing

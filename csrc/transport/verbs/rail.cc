#include "transport/verbs/rail.h"

#include <arpa/inet.h>
#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <utility>

#include "kvxfer/status.h"
#include "transport/common/socket.h"
#include "transport/verbs/nearest.h"

namespace kvxfer::ibv {
namespace {

constexpr int kMaxGids = 256;  // looked at for each port
constexpr size_t kMaxRails = 16;

// "mlx5_0:1" split at the colon; port 0 stands for all.
std::pair<std::string, int> split_port(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos) return {text, 0};
  const std::string digits = text.substr(colon + 1);
  const bool number = !digits.empty() && digits.size() <= 3 &&
                      std::all_of(digits.begin(), digits.end(),
                                  [](unsigned char c) { return c >= '0' && c <= '9'; });
  if (!number || std::stoi(digits) < 1 || std::stoi(digits) > 255) {
    throw Error(StatusCode::kInvalid,
                "verbs device '" + text + "' is not NAME or NAME:PORT with a port from 1 to 255");
  }
  return {text.substr(0, colon), std::stoi(digits)};
}

class DeviceList {
 public:
  explicit DeviceList(const Library& library) : library_(library) {
    list_ = library.get_device_list(&count_);
    if (!list_) {
      throw Error(StatusCode::kNoResources,
                  "cannot list RDMA devices: " + error_text(errno) +
                      "; is the kernel module ib_uverbs loaded, and /dev/infiniband there?");
    }
  }
  ~DeviceList() { library_.free_device_list(list_); }
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;

  int count() const { return count_; }
  Device* operator[](int i) const { return list_[i]; }
  std::string name(int i) const { return library_.get_device_name(list_[i]); }
  std::string names() const {
    std::string all;
    for (int i = 0; i < count_; ++i) all += (i ? ", " : "") + name(i);
    return all.empty() ? "none" : all;
  }

 private:
  const Library& library_;
  Device** list_ = nullptr;
  int count_ = 0;
};

std::shared_ptr<Nic> open_nic(const std::shared_ptr<const Library>& library, Device* device,
                              const std::string& sysfs) {
  auto nic = std::make_shared<Nic>();
  nic->library = library;
  nic->name = library->get_device_name(device);
  nic->place = place_of_adapter(sysfs, nic->name);
  nic->context = {library->open_device(device), library->close_device};
  if (!nic->context) {
    throw Error(StatusCode::kNoResources, "cannot open RDMA device '" + nic->name +
                                              "': " + error_text(errno) +
                                              "; may this user read and write /dev/infiniband?");
  }
  const int error = library->query_device(nic->context.get(), &nic->attr);
  if (error != 0) {
    throw Error(StatusCode::kNoResources,
                "cannot query RDMA device '" + nic->name + "': " + error_text(error));
  }
  nic->pd = {library->alloc_pd(nic->context.get()), library->dealloc_pd};
  if (!nic->pd) {
    throw Error(StatusCode::kNoResources,
                "RDMA device '" + nic->name + "' gives no protection domain: " + error_text(errno));
  }
  const int flags = ::fcntl(nic->context->async_fd, F_GETFL);
  ::fcntl(nic->context->async_fd, F_SETFL, flags | O_NONBLOCK);
  return nic;
}

std::vector<PortGid> list_gids(const Nic& nic, uint8_t port, const PortAttr& attr, int wanted) {
  std::vector<PortGid> gids;
  for (int i = 0; i < std::min(attr.gid_tbl_len, kMaxGids); ++i) {
    if (wanted >= 0 && i != wanted) continue;
    GidEntry entry{};
    if (nic.library->query_gid_ex(nic.context.get(), port, static_cast<uint32_t>(i), &entry, 0,
                                  sizeof(entry)) != 0) {
      continue;  // an empty place in the table
    }
    PortGid gid{static_cast<uint8_t>(i), static_cast<uint8_t>(entry.gid_type), {}};
    std::memcpy(gid.bytes.data(), entry.gid.raw, gid.bytes.size());
    if (gid.bytes != GidBytes{}) gids.push_back(gid);
  }
  return gids;
}

bool is_link_local(const GidBytes& gid) { return gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80; }

bool is_v4_mapped(const GidBytes& gid) {
  return std::all_of(gid.begin(), gid.begin() + 10, [](uint8_t byte) { return byte == 0; }) &&
         gid[10] == 0xff && gid[11] == 0xff;
}

int common_bits(const GidBytes& a, const GidBytes& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const unsigned differ = a[i] ^ b[i];
    if (differ) return static_cast<int>(i) * 8 + __builtin_clz(differ) - 24;
  }
  return 128;
}

}  // namespace

bool Rail::active() const {
  PortAttr now{};
  return nic->library->query_port(nic->context.get(), port, &now) == 0 && now.state == kPortActive;
}

Rails open_rails(const VerbsOptions& options) {
  const auto place = named_place(options);
  const auto library = Library::load(options.library);
  const DeviceList devices(*library);

  std::vector<std::pair<int, int>> wanted;  // position in the list, port (0: all)
  for (const std::string& text : options.devices) {
    const auto [name, port] = split_port(text);
    int found = -1;
    for (int i = 0; i < devices.count(); ++i) {
      if (devices.name(i) == name) found = i;
    }
    if (found < 0) {
      throw Error(StatusCode::kInvalid,
                  "there is no RDMA device '" + name + "'; there is " + devices.names());
    }
    wanted.emplace_back(found, port);
  }
  if (options.devices.empty()) {
    for (int i = 0; i < devices.count(); ++i) wanted.emplace_back(i, 0);
  }

  Rails result;
  std::string passed_over;
  for (const auto& [position, only_port] : wanted) {
    const auto known = std::find_if(
        result.nics.begin(), result.nics.end(),
        [&, position = position](const auto& nic) { return nic->name == devices.name(position); });
    const bool is_new = known == result.nics.end();
    const auto nic = is_new ? open_nic(library, devices[position], options.sysfs) : *known;
    const size_t nic_index = static_cast<size_t>(known - result.nics.begin());
    if (only_port > nic->attr.phys_port_cnt) {
      throw Error(StatusCode::kInvalid,
                  "RDMA device '" + nic->name + "' has " + std::to_string(nic->attr.phys_port_cnt) +
                      " port(s), there is no port " + std::to_string(only_port));
    }
    bool used = false;
    for (int port = 1; port <= nic->attr.phys_port_cnt; ++port) {
      if (only_port != 0 && port != only_port) continue;
      Rail rail;
      rail.nic = nic;
      rail.nic_index = nic_index;
      rail.port = static_cast<uint8_t>(port);
      const int error = library->query_port(nic->context.get(), rail.port, &rail.attr);
      if (error == 0) rail.gids = list_gids(*nic, rail.port, rail.attr, options.gid_index);
      std::string problem;
      if (error != 0) {
        problem = error_text(error);
      } else if (rail.attr.state != kPortActive) {
        problem = "not active";
      } else if (rail.gids.empty()) {
        problem = options.gid_index < 0 ? "no GID"
                                        : "no GID at index " + std::to_string(options.gid_index);
      }
      if (problem.empty()) {
        result.rails.push_back(std::move(rail));
        used = true;
      } else {
        passed_over += (passed_over.empty() ? "" : ", ") + rail.name() + ": " + problem;
      }
    }
    if (used && is_new) result.nics.push_back(nic);
  }
  if (result.rails.empty()) {
    throw Error(StatusCode::kNoResources,
                "no RDMA port can be used (" +
                    (passed_over.empty() ? "there is no RDMA device" : passed_over) +
                    "); ibv_devinfo shows the ports, 'rdma link' what they belong to");
  }
  keep_nearest(result, place, options);
  keep_first(result, kMaxRails);
  return result;
}

std::optional<GidChoice> choose_gids(const std::vector<PortGid>& first,
                                     const std::vector<PortGid>& second) {
  std::optional<GidChoice> best;
  std::tuple<int, int, int> best_score;
  for (size_t i = 0; i < first.size(); ++i) {
    for (size_t j = 0; j < second.size(); ++j) {
      const PortGid& a = first[i];
      const PortGid& b = second[j];
      if (a.type != b.type || is_link_local(a.bytes) != is_link_local(b.bytes) ||
          is_v4_mapped(a.bytes) != is_v4_mapped(b.bytes)) {
        continue;
      }
      const int bits = common_bits(a.bytes, b.bytes);
      const std::tuple<int, int, int> score{a.type == kGidRoceV2, !is_link_local(a.bytes), bits};
      if (best && score <= best_score) continue;
      best = {i, j, bits};
      best_score = score;
    }
  }
  return best;
}

std::string gid_text(const PortGid& gid) {
  char text[INET6_ADDRSTRLEN] = "?";
  ::inet_ntop(AF_INET6, gid.bytes.data(), text, sizeof(text));
  const char* type = gid.type == kGidRoceV2 ? "RoCE v2 " : gid.type == kGidRoceV1 ? "RoCE v1 " : "";
  return std::string(type) + text;
}

uint32_t mtu_bytes(uint32_t code) { return code >= 1 && code <= 5 ? 128u << code : 0; }

uint32_t mbit_per_second(const PortAttr& attr) {
  uint32_t lanes = 0;
  switch (attr.active_width) {
    case 1: lanes = 1; break;
    case 2: lanes = 4; break;
    case 4: lanes = 8; break;
    case 8: lanes = 12; break;
    case 16: lanes = 2; break;
  }
  uint32_t lane = 0;
  switch (attr.active_speed) {
    case 1: lane = 2500; break;
    case 2: lane = 5000; break;
    case 4:
    case 8: lane = 10000; break;
    case 16: lane = 14000; break;
    case 32: lane = 25000; break;
    case 64: lane = 50000; break;
    case 128: lane = 100000; break;
  }
  return lanes * lane;
}

}  // namespace kvxfer::ibv

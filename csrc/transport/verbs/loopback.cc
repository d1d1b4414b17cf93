#include "transport/verbs/loopback.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "base/clock.h"
#include "kvxfer/status.h"
#include "transport/common/socket.h"
#include "transport/verbs/queue_pair.h"

namespace kvxfer::ibv {
namespace {

// An answer within the host takes microseconds: for so long it is not worth sleeping.
constexpr Duration kSpin = std::chrono::microseconds(50);

VerbsOptions few(VerbsOptions options) {
  options.send_depth = options.receives = 4;
  return options;
}

TimePoint after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

// Two queue pairs of one port, connected with each other. After an error it is of no use any more.
class Loopback {
 public:
  Loopback(const Rail& rail, const VerbsOptions& options)
      : nic_(rail.nic), out_(rail, few(options)), in_(rail, few(options)) {
    const PortGid& gid = rail.gids[choose_gids(rail.gids, rail.gids)->first];
    RailAddress self;
    self.name = rail.name();
    self.ethernet = rail.attr.link_layer != kLinkInfiniBand;
    self.lid = rail.attr.lid;
    self.mtu = static_cast<uint8_t>(rail.attr.active_mtu);
    in_.connect(self, out_.address(), gid, gid);
    out_.connect(self, in_.address(), gid, gid);
  }

  void put(uint64_t to, uint32_t rkey, std::span<const std::byte> bytes, TimePoint end) {
    std::memcpy(out_.send_buffer(0), bytes.data(), bytes.size());
    SendWr request{};
    request.opcode = kRdmaWrite;
    request.remote_addr = to;
    request.rkey = rkey;
    send(request, {reinterpret_cast<uint64_t>(out_.send_buffer(0)),
                   static_cast<uint32_t>(bytes.size()), out_.buffer_lkey()});
    wait(out_, end);
  }

  void get(uint64_t from, uint32_t lkey, std::span<std::byte> bytes, TimePoint end) {
    SendWr request{};
    request.opcode = kSend;
    send(request, {from, static_cast<uint32_t>(bytes.size()), lkey});
    wait(out_, end);
    const Wc received = wait(in_, end);
    std::memcpy(bytes.data(), in_.receive_buffer(received.wr_id), bytes.size());
    if (const int error = in_.post_receive(received.wr_id)) fail(error_text(error));
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(StatusCode::kNoResources, "RDMA device '" + nic_->name + "', to itself: " + what);
  }

  void send(SendWr& request, Sge where) {
    request.sg_list = &where;
    request.num_sge = 1;
    request.send_flags = kSignaled;
    SendWr* bad = nullptr;
    if (const int error = out_.post(&request, &bad)) fail(error_text(error));
  }

  Wc wait(QueuePair& qp, TimePoint end) {
    Wc found{};
    bool armed = false;
    const TimePoint sleep_from = Clock::now() + kSpin;
    while (true) {
      const int count = qp.poll({&found, 1});
      if (count < 0) fail("its completion queue is broken");
      if (count > 0) break;
      const TimePoint now = Clock::now();
      if (now >= end) fail("no completion in time");
      if (now < sleep_from) continue;
      if (!armed) {
        if (const int error = qp.arm()) fail(error_text(error));
        armed = true;
        continue;
      }
      pollfd event{qp.event_fd(), POLLIN, 0};
      ::poll(&event, 1, std::min(100, millis_until(end, now)));
      qp.take_events();
      armed = false;
    }
    if (found.status != kSuccess) {
      fail(std::string(nic_->library->wc_status_str(found.status)) + " (vendor error " +
           std::to_string(found.vendor_err) + ")");
    }
    return found;
  }

  const std::shared_ptr<Nic> nic_;
  QueuePair out_, in_;
};

Loopbacks::Loopbacks(const std::vector<Rail>& rails, size_t nics, const VerbsOptions& options)
    : options_(options) {
  for (size_t i = 0; i < nics; ++i) slots_.push_back(std::make_unique<Slot>());
  for (const Rail& rail : rails) slots_[rail.nic_index]->rails.push_back(rail);
}

Loopbacks::~Loopbacks() = default;

std::string Loopbacks::name(size_t nic) const { return slots_[nic]->rails.front().nic->name; }

template <typename Use>
void Loopbacks::use(size_t nic, Use use) {
  Slot& slot = *slots_[nic];
  const std::lock_guard lock(slot.mutex);
  if (!slot.loopback) {
    const auto rail = std::find_if(slot.rails.begin(), slot.rails.end(),
                                   [](const Rail& candidate) { return candidate.active(); });
    if (rail == slot.rails.end()) {
      throw Error(StatusCode::kNoResources, "RDMA device '" + name(nic) + "' has no active port");
    }
    slot.loopback = std::make_unique<Loopback>(*rail, options_);
  }
  try {
    use(*slot.loopback);
  } catch (...) {
    slot.loopback.reset();  // its queue pairs end here, and with them what they were told
    throw;
  }
}

void Loopbacks::put(size_t nic, uint64_t to, uint32_t rkey, std::span<const std::byte> bytes,
                    double seconds) {
  use(nic, [&](Loopback& loopback) { loopback.put(to, rkey, bytes, after(seconds)); });
}

void Loopbacks::get(size_t nic, uint64_t from, uint32_t lkey, std::span<std::byte> bytes,
                    double seconds) {
  use(nic, [&](Loopback& loopback) { loopback.get(from, lkey, bytes, after(seconds)); });
}

}  // namespace kvxfer::ibv

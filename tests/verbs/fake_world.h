#ifndef KVXFER_TESTS_FAKE_WORLD_H_
#define KVXFER_TESTS_FAKE_WORLD_H_

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fake_verbs.h"
#include "transport/verbs/abi.h"

namespace kvxfer::ibv {
struct Device {
  fake_verbs::Device* facts = nullptr;
};
}  // namespace kvxfer::ibv

namespace fake_verbs::detail {

namespace ibv = kvxfer::ibv;
using Clock = std::chrono::steady_clock;
using Bytes = std::vector<std::byte>;

struct Qp;

struct Context : ibv::Context {
  fake_verbs::Device* facts = nullptr;
  std::deque<ibv::AsyncEvent> events;
};

struct Channel : ibv::CompChannel {
  std::deque<ibv::Cq*> events;
};

struct Completion {
  ibv::Wc wc;
  Qp* qp = nullptr;
  uint32_t retires = 0;  // places in the send queue
};

struct Cq : ibv::Cq {
  std::deque<Completion> queue;
  bool armed = false;
  bool overrun = false;  // gives nothing any more
  unsigned unacknowledged = 0;
  int events_out = 0;  // of the adapter: read by the user, not acknowledged
};

struct Mr : ibv::Mr {
  uint64_t iova = 0;
  unsigned access = 0;
  bool revoked = false;  // peers reach it no more
  // Of a dma-buf, or what a peer-memory module knows: what it is mapped to, for as long as it is
  // registered. `addr` is within.
  void* mapped = nullptr;
  size_t mapped_bytes = 0;
};

// Of an adapter into a GPU's memory, on its way.
struct DelayedWrite {
  const Mr* mr = nullptr;
  const fake_verbs::Device* by = nullptr;
  std::byte* to = nullptr;
  Bytes bytes;
};

struct Request {
  ibv::SendWr wr{};
  std::vector<ibv::Sge> where;
  Bytes inlined;
};

struct Qp : ibv::Qp {
  fake_verbs::Device* facts = nullptr;
  ibv::QpCap cap{};
  ibv::QpAttr attr{};
  uint32_t occupied = 0;  // places in the send queue
  uint32_t unsignalled = 0;
  std::deque<Request> sends;
  std::deque<Request> unacknowledged;  // delivered, but the sender does not know
  std::deque<std::pair<uint64_t, ibv::Sge>> receives;
  std::optional<Clock::time_point> fails_at;
  int events_out = 0;  // read by the user, not acknowledged
};

// How many events about the object of `event`, if any, the user has read and not acknowledged.
int* events_out(const ibv::AsyncEvent& event);

struct Fault {
  int error = 0, skip = 0, times = 0;
};

// All state, and the thread that carries out work requests.
class World {
 public:
  World();
  ~World();

  void set_devices(const std::vector<fake_verbs::Device>& given);
  void forget_faults();
  int injected(const char* function);

  void violation(const std::string& what) {
    ++counts.violations;
    last_violation = what;
  }

  fake_verbs::Port& port_of(const Qp& qp) { return qp.facts->ports.at(qp.attr.port_num - 1u); }

  void push(ibv::Cq* raw, Completion completion);
  void complete_send(Qp& qp, const ibv::SendWr& wr, ibv::WcStatus status);
  void complete_receive(Qp& qp, uint64_t wr_id, ibv::WcStatus status, uint32_t bytes);
  void to_error(Qp& qp, ibv::WcStatus first = ibv::kFlushed);
  void add_event(Context& context, ibv::AsyncEvent event);
  // Of the delayed writes, those are there now.
  void land(const std::function<bool(const DelayedWrite&)>& which);

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<fake_verbs::Device> devices;
  std::deque<ibv::Device> handles;
  std::map<std::string, Fault> faults;
  std::set<Context*> contexts;
  std::set<ibv::Pd*> pds;
  std::set<Mr*> mrs;
  std::set<Channel*> channels;
  std::set<Cq*> cqs;
  std::map<uint32_t, Qp*> qps;
  std::vector<std::pair<ibv::Cq*, Completion>> held;
  bool hold_completions = false, hold_sends = false, hold_registrations = false;
  bool lose_gpu_writes = false, delay_gpu_writes = false;
  uint64_t offset_mask = UINT64_MAX;
  std::deque<DelayedWrite> delayed;
  uint32_t flips = 0;  // RDMA writes that are yet to be damaged
  fake_verbs::PeerMemory peer_memory = nullptr;
  std::set<std::string> mute;  // devices whose sends are not acknowledged
  std::chrono::milliseconds retry{50};
  fake_verbs::Counts counts;
  std::map<std::pair<std::string, uint32_t>, uint64_t> bytes;
  std::string last_violation;
  fake_verbs::Registration last_registration;
  uint32_t next_qp = 0x11;
  uint32_t next_key = 0x1000;

 private:
  Qp* peer_of(const Qp& qp);
  // Null, and a violation, when the key does not allow it.
  Mr* find_mr(uint32_t key, bool remote, const ibv::Pd* pd, uint64_t address, uint64_t length);
  std::optional<Bytes> gather(Qp& qp, const Request& request);
  // Carries out the first send of `qp`. False: it has to wait.
  bool step(Qp& qp, Clock::time_point now);
  void run();

  bool stopping_ = false;
  std::thread worker_;
};

World& world();

// The calls that go through the table of a context.
void set_data_path(ibv::ContextOps& ops);

template <typename T>
T* fail(int error) {
  errno = error;
  return nullptr;
}

}  // namespace fake_verbs::detail

#endif  // KVXFER_TESTS_FAKE_WORLD_H_

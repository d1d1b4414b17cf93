#include "fake_verbs.h"

#include <dlfcn.h>

#include <algorithm>

#include "fake_world.h"

extern "C" int ibv_fork_init();

namespace fake_verbs {

using namespace detail;

std::vector<Device> default_devices() {
  std::vector<Device> devices(2);
  for (size_t i = 0; i < devices.size(); ++i) {
    devices[i].name = "fake" + std::to_string(i);
    devices[i].ports.resize(1);
    devices[i].ports[0].gids = {{2, "fe80::" + std::to_string(i + 1)},
                                {2, "::ffff:10.9." + std::to_string(i) + ".1"}};
  }
  return devices;
}

void reset(std::vector<Device> devices) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.forget_faults();
  all.counts = {};
  all.bytes.clear();
  all.last_violation.clear();
  all.set_devices(devices);
}

std::string library_path() {
  Dl_info info{};
  ::dladdr(reinterpret_cast<void*>(&ibv_fork_init), &info);
  return info.dli_fname;
}

void fail_calls(const std::string& function, int error, int skip, int times) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.faults[function] = {error, skip, times};
}

void set_port(const std::string& device, uint32_t port, bool active) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  for (Device& facts : all.devices) {
    if (facts.name == device) facts.ports.at(port - 1u).active = active;
  }
  for (Context* context : all.contexts) {
    if (context->facts->name != device) continue;
    ibv::AsyncEvent event{};
    event.element.port_num = static_cast<int>(port);
    event.event_type = active ? ibv::kPortUp : ibv::kPortError;
    all.add_event(*context, event);
  }
  all.changed.notify_all();
}

void set_retry_ms(uint32_t milliseconds) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.retry = std::chrono::milliseconds(milliseconds);
}

void break_queue_pairs(const std::string& device, bool with_event) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  for (const auto& [number, qp] : all.qps) {
    if (qp->facts->name != device ||
        (qp->state != ibv::kReadyToSend && qp->state != ibv::kReadyToReceive)) {
      continue;
    }
    all.to_error(*qp);
    if (!with_event) continue;
    ibv::AsyncEvent event{};
    event.element.qp = qp;
    event.event_type = ibv::kQpFatal;
    all.add_event(static_cast<Context&>(*qp->context), event);
  }
}

void revoke_remote_keys(const std::string& device) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  for (Mr* mr : all.mrs) {
    if (static_cast<Context*>(mr->context)->facts->name == device) mr->revoked = true;
  }
}

void overrun_completion_queues(const std::string& device, bool with_receives) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  for (Cq* cq : all.cqs) {
    auto& context = static_cast<Context&>(*cq->context);
    if (context.facts->name != device) continue;
    std::erase_if(cq->queue, [&](const Completion& completion) {
      return with_receives || completion.wc.opcode != ibv::kWcReceive;
    });
    cq->overrun = true;
    ibv::AsyncEvent event{};
    event.element.cq = cq;
    event.event_type = ibv::kCqError;
    all.add_event(context, event);
  }
  for (const auto& [number, qp] : all.qps) {
    if (qp->facts->name == device) all.to_error(*qp);
  }
}

void fail_device(const std::string& device) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  for (Device& facts : all.devices) {
    if (facts.name != device) continue;
    for (Port& port : facts.ports) port.active = false;
  }
  for (const auto& [number, qp] : all.qps) {
    if (qp->facts->name == device) all.to_error(*qp);
  }
  for (Context* context : all.contexts) {
    if (context->facts->name != device) continue;
    ibv::AsyncEvent event{};
    event.event_type = ibv::kDeviceFatal;
    all.add_event(*context, event);
  }
}

void hold_send_completions(bool hold) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.hold_completions = hold;
  if (hold) return;
  for (const auto& [cq, completion] : std::exchange(all.held, {})) all.push(cq, completion);
}

void hold_sends(bool hold) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.hold_sends = hold;
  all.changed.notify_all();
}

void hold_registrations(bool hold) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.hold_registrations = hold;
  all.changed.notify_all();
}

void lose_gpu_writes(bool lose) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.lose_gpu_writes = lose;
}

void mask_offsets(uint64_t mask) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.offset_mask = mask;
}

void delay_gpu_writes(bool delay) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.delay_gpu_writes = delay;
}

void land_gpu_writes() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.land([](const DelayedWrite&) { return true; });
}

size_t delayed_gpu_writes() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  return all.delayed.size();
}

void flip_writes(uint32_t times) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.flips = times;
}

void set_peer_memory(PeerMemory find) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.peer_memory = find;
}

void lose_acknowledgements(const std::string& device, bool lose) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  if (lose) {
    all.mute.insert(device);
  } else {
    all.mute.erase(device);
  }
}

Objects objects() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  const auto count = [](const auto& set) { return static_cast<int>(set.size()); };
  return {count(all.contexts), count(all.pds), count(all.mrs),
          count(all.channels), count(all.cqs), count(all.qps)};
}

Counts counts() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  return all.counts;
}

void clear_counts() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.counts = {};
}

std::string last_violation() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  return all.last_violation;
}

uint64_t bytes_sent(const std::string& device, uint32_t port) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  return all.bytes[{device, port}];
}

Registration last_registration() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  return all.last_registration;
}

}  // namespace fake_verbs

using namespace fake_verbs::detail;

extern "C" {

bool fake_verbs_set_port(const char* device, uint32_t port, bool active) {
  {
    World& all = world();
    const std::lock_guard lock(all.mutex);
    const auto found =
        std::find_if(all.devices.begin(), all.devices.end(),
                     [&](const fake_verbs::Device& facts) { return facts.name == device; });
    if (found == all.devices.end() || port == 0 || port > found->ports.size()) return false;
  }
  fake_verbs::set_port(device, port, active);
  return true;
}

void fake_verbs_set_retry_ms(uint32_t milliseconds) { fake_verbs::set_retry_ms(milliseconds); }

void fake_verbs_break_queue_pairs(const char* device, bool with_event) {
  fake_verbs::break_queue_pairs(device, with_event);
}

void fake_verbs_revoke_remote_keys(const char* device) { fake_verbs::revoke_remote_keys(device); }

void fake_verbs_overrun_completion_queues(const char* device) {
  fake_verbs::overrun_completion_queues(device);
}

void fake_verbs_fail_device(const char* device) { fake_verbs::fail_device(device); }

void fake_verbs_hold_sends(bool hold) { fake_verbs::hold_sends(hold); }

void fake_verbs_hold_registrations(bool hold) { fake_verbs::hold_registrations(hold); }

void fake_verbs_set_max_mr_size(uint64_t bytes) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  for (fake_verbs::Device& facts : all.devices) facts.max_mr_size = bytes;
}

void fake_verbs_lose_gpu_writes(bool lose) { fake_verbs::lose_gpu_writes(lose); }

void fake_verbs_mask_offsets(uint64_t mask) { fake_verbs::mask_offsets(mask); }

void fake_verbs_delay_gpu_writes(bool delay) { fake_verbs::delay_gpu_writes(delay); }

void fake_verbs_land_gpu_writes() { fake_verbs::land_gpu_writes(); }

uint64_t fake_verbs_delayed_gpu_writes() { return fake_verbs::delayed_gpu_writes(); }

void fake_verbs_flip_writes(uint32_t times) { fake_verbs::flip_writes(times); }

void fake_verbs_set_peer_memory(fake_verbs::PeerMemory find) { fake_verbs::set_peer_memory(find); }

void fake_verbs_lose_acknowledgements(const char* device, bool lose) {
  fake_verbs::lose_acknowledgements(device, lose);
}

void fake_verbs_fail_calls(const char* function, int error, int skip, int times) {
  fake_verbs::fail_calls(function, error, skip, times);
}

void fake_verbs_forget_faults() {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  all.forget_faults();
  all.changed.notify_all();
}

uint64_t fake_verbs_bytes_sent(const char* device, uint32_t port) {
  return fake_verbs::bytes_sent(device, port);
}

uint64_t fake_verbs_registrations() { return fake_verbs::counts().registrations; }

uint64_t fake_verbs_fetched_sends() { return fake_verbs::counts().fetched_sends; }

uint64_t fake_verbs_violations() { return fake_verbs::counts().violations; }

uint64_t fake_verbs_objects() { return static_cast<uint64_t>(fake_verbs::objects().total()); }

uint32_t fake_verbs_remote_keys(uint32_t* keys, uint32_t room) {
  World& all = world();
  const std::lock_guard lock(all.mutex);
  uint32_t count = 0;
  for (const Mr* mr : all.mrs) {
    if (!(mr->access & ibv::kRemoteWrite)) continue;
    if (count < room) keys[count] = mr->rkey;
    ++count;
  }
  return count;
}

}  // extern "C"

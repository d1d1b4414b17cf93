#ifndef KVXFER_TESTS_FAKE_VERBS_H_
#define KVXFER_TESTS_FAKE_VERBS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// A stand-in for libibverbs that moves bytes between queue pairs of one process, so that the verbs
// transport can be tested anywhere, and fail as no adapter does on request. It is a library of its
// own, loaded by path like the real one; tests also link with it to reach what is declared here.
//
// It checks what an adapter checks: states, keys, bounds, protection domains, GIDs, depths of
// queues.
namespace fake_verbs {

struct Gid {
  uint32_t type = 2;  // RoCE v2
  std::string text;   // "::ffff:10.0.0.1"
};

struct Port {
  std::vector<Gid> gids;
  bool active = true;
  bool infiniband = false;
  uint16_t lid = 0;
  uint8_t width = 2;    // 4 lanes
  uint8_t speed = 128;  // of 100 Gbit/s
  uint32_t mtu = 5;     // 4096
  uint32_t max_message = 1u << 30;
};

struct Device {
  std::string name;
  std::vector<Port> ports;
  uint64_t max_mr_size = ~uint64_t{0};
  int max_qp_wr = 1024;
  int max_cqe = 65536;
  int max_srq = 0;
  uint32_t max_inline = 256;
};

// Two adapters, "fake0" and "fake1", in a subnet each: what there is in the beginning.
std::vector<Device> default_devices();

// Forgets all faults and replaces the devices. Nothing may be open.
void reset(std::vector<Device> devices);

// The path of the library itself.
std::string library_path();

// The next `times` calls of a function ("reg_mr", "create_qp", "post_send", ...) after `skip` good
// ones fail with `error`.
void fail_calls(const std::string& function, int error, int skip = 0, int times = 1);

// Takes a port down or brings it up, with the event that adapters report. Sends over a port that is
// down fail after retry_ms, as do those to a queue pair that does not answer.
void set_port(const std::string& device, uint32_t port, bool active);
void set_retry_ms(uint32_t milliseconds);

// Every queue pair of the device that is connected fails, with an event or without.
void break_queue_pairs(const std::string& device, bool with_event);

// Peers may write into nothing any more that is registered with the device: it was deregistered.
void revoke_remote_keys(const std::string& device);

// Every completion queue of the device overruns: nothing comes after it, its queue pairs fail, and
// an event says so. What was in it is lost, but for receives that were through: their senders may
// have been told. Those only `with_receives`.
void overrun_completion_queues(const std::string& device, bool with_receives = false);

// The device fails as a whole, with an event, and has no port that is active.
void fail_device(const std::string& device);

// While held, work requests are carried out but their completions do not come.
void hold_send_completions(bool hold);
// While held, what is posted is not carried out.
void hold_sends(bool hold);
// While held, who registers memory waits.
void hold_registrations(bool hold);
// What is delivered from now on is not acknowledged: the bytes and the notice arrive, and the
// sender fails after retry_ms.
void lose_acknowledgements(const std::string& device, bool lose);

// Registrations of GPU memory from now on look all right, and lead to memory that nobody sees.
void lose_gpu_writes(bool lose);
// Of where in dma-bufs memory begins, registrations from now on heed these bits.
void mask_offsets(uint64_t mask);
// While set, what adapters write into GPU memory is on its way, and acknowledged, but not there:
// not before land_gpu_writes(), or that adapter reads from GPU memory, or its registration ends.
void delay_gpu_writes(bool delay);
void land_gpu_writes();
size_t delayed_gpu_writes();
// In each of the next `times` RDMA writes a bit is flipped on its way.
void flip_writes(uint32_t times);
// What a peer-memory module knows of an address: a descriptor of what is there, which the caller
// closes, and where in it. Negative: nothing. Without one only the host's memory can be registered.
using PeerMemory = int (*)(uintptr_t address, size_t bytes, int* fd, size_t* offset);
void set_peer_memory(PeerMemory find);

struct Objects {
  int contexts = 0, pds = 0, mrs = 0, channels = 0, cqs = 0, qps = 0;
  int total() const { return contexts + pds + mrs + channels + cqs + qps; }
};
Objects objects();

struct Counts {
  uint64_t lists = 0, sends = 0, writes = 0, signalled = 0, inlined = 0, registrations = 0;
  uint64_t fetched_sends = 0;  // whose bytes the adapter fetched: not inline
  uint64_t overruns = 0;       // of completion queues
  uint64_t violations = 0;     // keys, bounds, states: what a correct user never meets
};
Counts counts();
void clear_counts();
std::string last_violation();

// Bytes that went out through each port so far.
uint64_t bytes_sent(const std::string& device, uint32_t port);

// Access flags of the last registration, and what the last dma-buf one was given.
struct Registration {
  int fd = -1;
  uint64_t offset = 0, length = 0, iova = 0;
  unsigned access = 0;
};
Registration last_registration();

}  // namespace fake_verbs

// The same for callers from Python. False: there is no such port.
extern "C" {
bool fake_verbs_set_port(const char* device, uint32_t port, bool active);
void fake_verbs_set_retry_ms(uint32_t milliseconds);
void fake_verbs_break_queue_pairs(const char* device, bool with_event);
void fake_verbs_revoke_remote_keys(const char* device);
void fake_verbs_overrun_completion_queues(const char* device);
void fake_verbs_fail_device(const char* device);
void fake_verbs_hold_sends(bool hold);
void fake_verbs_hold_registrations(bool hold);
void fake_verbs_set_max_mr_size(uint64_t bytes);  // of devices that are opened from now on
void fake_verbs_lose_gpu_writes(bool lose);
void fake_verbs_mask_offsets(uint64_t mask);
void fake_verbs_delay_gpu_writes(bool delay);
void fake_verbs_land_gpu_writes();
uint64_t fake_verbs_delayed_gpu_writes();
void fake_verbs_flip_writes(uint32_t times);
void fake_verbs_set_peer_memory(fake_verbs::PeerMemory find);
void fake_verbs_lose_acknowledgements(const char* device, bool lose);
void fake_verbs_fail_calls(const char* function, int error, int skip, int times);
void fake_verbs_forget_faults();
uint64_t fake_verbs_bytes_sent(const char* device, uint32_t port);
uint64_t fake_verbs_violations();
uint64_t fake_verbs_objects();
uint64_t fake_verbs_registrations();  // so far
uint64_t fake_verbs_fetched_sends();  // the same
// The first `room` remote keys that are valid; returns how many there are.
uint32_t fake_verbs_remote_keys(uint32_t* keys, uint32_t room);
}

#endif  // KVXFER_TESTS_FAKE_VERBS_H_

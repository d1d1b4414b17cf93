#ifndef KVXFER_TRANSPORT_UCX_ABI_H_
#define KVXFER_TRANSPORT_UCX_ABI_H_

#include <cstddef>
#include <cstdint>

// The part of UCP's binary interface that is used here, as of version 1.13. Later ones have added
// to the ends of these structures, whose masks say which fields are set. Declared here so that no
// header is needed to build; tests/cpp/ucx_abi_test.cc compares it with the real one.
namespace kvxfer::ucp {

constexpr unsigned kApiMajor = 1;
constexpr unsigned kApiMinor = 13;

struct Config;
struct Context;
struct Worker;
struct Endpoint;
struct Memory;
struct Rkey;
struct Address;

enum Status : int8_t {
  kOk = 0,
  kInProgress = 1,
  kBusy = -15,
  kCanceled = -16,
  kLast = -100,
};

// What posts an operation returns: null when it is complete already, a Status, or a request.
using StatusPtr = void*;
inline bool is_error(StatusPtr result) {
  return reinterpret_cast<uintptr_t>(result) >=
         static_cast<uintptr_t>(static_cast<intptr_t>(kLast));
}
inline Status status_of(StatusPtr error) {
  return static_cast<Status>(reinterpret_cast<intptr_t>(error));
}

constexpr uint64_t kFeatureRma = 1u << 1;
constexpr uint64_t kFeatureWakeup = 1u << 4;
constexpr uint64_t kFeatureAm = 1u << 6;

struct Params {
  static constexpr uint64_t kFeatures = 1u << 0, kMtWorkersShared = 1u << 5;
  uint64_t field_mask = 0;
  uint64_t features = 0;
  size_t request_size = 0;
  void (*request_init)(void*) = nullptr;
  void (*request_cleanup)(void*) = nullptr;
  uint64_t tag_sender_mask = 0;
  int mt_workers_shared = 0;
  size_t estimated_num_eps = 0;
  size_t estimated_num_ppn = 0;
  const char* name = nullptr;
};

enum ThreadMode : uint32_t { kThreadSingle, kThreadSerialized, kThreadMulti };

struct LibAttr {
  static constexpr uint64_t kMaxThreadLevel = 1u << 0;
  uint64_t field_mask = 0;
  ThreadMode max_thread_level = kThreadSingle;
};

struct WorkerParams {
  static constexpr uint64_t kThreadMode = 1u << 0;
  uint64_t field_mask = 0;
  ThreadMode thread_mode = kThreadSingle;
  uint64_t cpu_mask[16] = {};
  unsigned events = 0;
  void* user_data = nullptr;
  int event_fd = -1;
  uint64_t flags = 0;
  const char* name = nullptr;
  size_t am_alignment = 0;
  uint64_t client_id = 0;
};

struct WorkerAttr {
  static constexpr uint64_t kAddress = 1u << 1;
  uint64_t field_mask = 0;
  ThreadMode thread_mode = kThreadSingle;
  uint32_t address_flags = 0;
  Address* address = nullptr;
  size_t address_length = 0;
  size_t max_am_header = 0;
  char name[32] = {};
  size_t max_debug_string = 0;
};

enum MemoryType : uint32_t { kHostMemory };

constexpr unsigned kLocalRead = 1u << 0, kLocalWrite = 1u << 1, kRemoteWrite = 1u << 9;

struct MemMapParams {
  static constexpr uint64_t kAddress = 1u << 0, kLength = 1u << 1, kProt = 1u << 3,
                            kMemoryType = 1u << 4;
  uint64_t field_mask = 0;
  void* address = nullptr;
  size_t length = 0;
  unsigned flags = 0;
  unsigned prot = 0;
  MemoryType memory_type = kHostMemory;
};

enum ErrMode : uint32_t { kErrNone, kErrPeer };

struct ErrHandler {
  void (*cb)(void* arg, Endpoint* ep, Status status) = nullptr;
  void* arg = nullptr;
};

struct SockAddr {
  const void* addr = nullptr;
  uint32_t addrlen = 0;
};

struct EndpointParams {
  static constexpr uint64_t kRemoteAddress = 1u << 0, kErrMode = 1u << 1, kErrHandler = 1u << 2;
  uint64_t field_mask = 0;
  const Address* address = nullptr;
  ErrMode err_mode = kErrNone;
  ErrHandler err_handler;
  void* user_data = nullptr;
  unsigned flags = 0;
  SockAddr sockaddr;
  void* conn_request = nullptr;
  const char* name = nullptr;
  SockAddr local_sockaddr;
};

using SendCallback = void (*)(void* request, Status status, void* user_data);

constexpr uint32_t kSendEager = 1u << 1;   // RequestParam::flags of an active message
constexpr uint32_t kCloseForce = 1u << 0;  // of closing an endpoint

struct RequestParam {
  static constexpr uint32_t kCallback = 1u << 1, kUserData = 1u << 2, kFlags = 1u << 4,
                            kDatatype = 1u << 3, kMemoryType = 1u << 6, kMemh = 1u << 8;
  uint32_t op_attr_mask = 0;
  uint32_t flags = 0;
  void* request = nullptr;
  SendCallback callback = nullptr;
  uint64_t datatype = 0;
  void* user_data = nullptr;
  void* reply_buffer = nullptr;
  MemoryType memory_type = kHostMemory;
  void* recv_info = nullptr;
  Memory* memh = nullptr;
};

constexpr uint64_t kIovDatatype = 2;

struct Iov {
  const void* buffer = nullptr;
  size_t length = 0;
};

struct AmRecvParam {
  static constexpr uint64_t kData = 1u << 16;
  uint64_t recv_attr = 0;
  Endpoint* reply_ep = nullptr;
};

using AmCallback = Status (*)(void* arg, const void* header, size_t header_length, void* data,
                              size_t length, const AmRecvParam* param);

struct AmHandlerParam {
  static constexpr uint64_t kId = 1u << 0, kFlags = 1u << 1, kCallback = 1u << 2, kArg = 1u << 3;
  static constexpr uint32_t kWholeMessage = 1u << 0, kPersistentData = 1u << 1;
  uint64_t field_mask = 0;
  unsigned id = 0;
  uint32_t flags = 0;
  AmCallback cb = nullptr;
  void* arg = nullptr;
};

struct PerfParam {
  static constexpr uint64_t kMessageSize = 1u << 0;
  uint64_t field_mask = 0;
  size_t message_size = 0;
};

struct PerfAttr {
  static constexpr uint64_t kEstimatedTime = 1u << 0;
  uint64_t field_mask = 0;
  double estimated_time = 0;  // seconds
};

}  // namespace kvxfer::ucp

#endif  // KVXFER_TRANSPORT_UCX_ABI_H_

#ifndef KVXFER_TRANSPORT_VERBS_ABI_H_
#define KVXFER_TRANSPORT_VERBS_ABI_H_

#include <cstddef>
#include <cstdint>

// The part of the binary interface of libibverbs.so.1 that is used here, so that kvxfer builds
// without its headers and runs without the library. The interface is frozen (its symbols have been
// at version IBVERBS_1.1 since 2007, what came later is only added), and
// tests/cpp/verbs_abi_test.cc compares every field with <infiniband/verbs.h> where that is
// installed. Fields that nobody here reads have no names.
namespace kvxfer::ibv {

struct Device;  // opaque
struct Context;
struct Mw;   // never used: memory windows are not portable
struct Srq;  // never used: not all adapters have shared receive queues

enum PortState : uint32_t { kPortDown = 1, kPortActive = 4 };
enum LinkLayer : uint8_t { kLinkUnspecified = 0, kLinkInfiniBand = 1, kLinkEthernet = 2 };
enum GidType : uint32_t { kGidInfiniBand = 0, kGidRoceV1 = 1, kGidRoceV2 = 2 };
enum QpState : uint32_t {
  kReset,
  kInit,
  kReadyToReceive,
  kReadyToSend,
  kDrained,
  kSqError,
  kError
};
enum QpType : uint32_t { kReliableConnection = 2 };

enum AccessFlags : int {
  kLocalWrite = 1,
  kRemoteWrite = 1 << 1,
  kRemoteRead = 1 << 2,
  kRelaxedOrdering = 1 << 20,
};

enum QpAttrMask : int {
  kMaskState = 1 << 0,
  kMaskAccess = 1 << 3,
  kMaskPkeyIndex = 1 << 4,
  kMaskPort = 1 << 5,
  kMaskAddress = 1 << 7,
  kMaskPathMtu = 1 << 8,
  kMaskTimeout = 1 << 9,
  kMaskRetryCount = 1 << 10,
  kMaskRnrRetry = 1 << 11,
  kMaskReceivePsn = 1 << 12,
  kMaskMaxReadAtomic = 1 << 13,
  kMaskMinRnrTimer = 1 << 15,
  kMaskSendPsn = 1 << 16,
  kMaskMaxDestReadAtomic = 1 << 17,
  kMaskDestQpNum = 1 << 20,
};

enum WrOpcode : uint32_t { kRdmaWrite = 0, kRdmaWriteWithImm = 1, kSend = 2 };
enum SendFlags : unsigned { kSignaled = 1 << 1, kInline = 1 << 3 };

enum WcStatus : uint32_t {
  kSuccess = 0,
  kLocalLengthError = 1,
  kLocalQpOperationError = 2,
  kLocalProtectionError = 4,
  kFlushed = 5,
  kLocalAccessError = 8,
  kRemoteInvalidRequest = 9,
  kRemoteAccessError = 10,
  kRemoteOperationError = 11,
  kRetryExceeded = 12,
  kRnrRetryExceeded = 13,
  kFatalError = 19,
  kGeneralError = 21,
};
enum WcOpcode : uint32_t { kWcSend = 0, kWcRdmaWrite = 1, kWcReceive = 128 };

enum EventType : uint32_t {
  kCqError = 0,
  kQpFatal = 1,
  kQpRequestError = 2,
  kQpAccessError = 3,
  kDeviceFatal = 8,
  kPortUp = 9,
  kPortError = 10,
};

union Gid {
  uint8_t raw[16];
  uint64_t aligned[2];
};

struct GidEntry {
  Gid gid;
  uint32_t gid_index;
  uint32_t port_num;
  uint32_t gid_type;
  uint32_t ndev_ifindex;
};

struct DeviceAttr {
  char fw_ver[64];
  uint64_t node_guid;
  uint64_t sys_image_guid;
  uint64_t max_mr_size;
  uint64_t page_size_cap;
  uint32_t vendor_id;
  uint32_t vendor_part_id;
  uint32_t hw_ver;
  int max_qp;
  int max_qp_wr;
  unsigned device_cap_flags;
  int max_sge;
  int max_sge_rd;
  int max_cq;
  int max_cqe;
  int max_mr;
  int max_pd;
  int unused1[14];
  int max_ah;
  int unused2[2];
  int max_srq;
  int max_srq_wr;
  int max_srq_sge;
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay;
  uint8_t phys_port_cnt;
};

struct PortAttr {
  PortState state;
  uint32_t max_mtu;
  uint32_t active_mtu;
  int gid_tbl_len;
  uint32_t port_cap_flags;
  uint32_t max_msg_sz;
  uint32_t unused1[2];
  uint16_t pkey_tbl_len;
  uint16_t lid;
  uint16_t unused2;
  uint8_t unused3[5];
  uint8_t active_width;
  uint8_t active_speed;
  uint8_t phys_state;
  uint8_t link_layer;
  uint8_t unused4;
  uint16_t unused5;
};

struct Pd {
  Context* context;
  uint32_t handle;
};

struct Mr {
  Context* context;
  Pd* pd;
  void* addr;
  size_t length;
  uint32_t handle;
  uint32_t lkey;
  uint32_t rkey;
};

struct CompChannel {
  Context* context;
  int fd;
  int refcnt;
};

struct Cq {
  Context* context;
  CompChannel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
};

struct Qp {
  Context* context;
  void* qp_context;
  Pd* pd;
  Cq* send_cq;
  Cq* recv_cq;
  Srq* srq;
  uint32_t handle;
  uint32_t qp_num;
  QpState state;
  QpType qp_type;
};

struct QpCap {
  uint32_t max_send_wr;
  uint32_t max_recv_wr;
  uint32_t max_send_sge;
  uint32_t max_recv_sge;
  uint32_t max_inline_data;
};

struct QpInitAttr {
  void* qp_context;
  Cq* send_cq;
  Cq* recv_cq;
  Srq* srq;
  QpCap cap;
  QpType qp_type;
  int sq_sig_all;
};

struct GlobalRoute {
  Gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index;
  uint8_t hop_limit;
  uint8_t traffic_class;
};

struct AhAttr {
  GlobalRoute grh;
  uint16_t dlid;
  uint8_t sl;
  uint8_t src_path_bits;
  uint8_t static_rate;
  uint8_t is_global;
  uint8_t port_num;
};

struct QpAttr {
  QpState qp_state;
  QpState cur_qp_state;
  uint32_t path_mtu;
  uint32_t unused1;
  uint32_t qkey;
  uint32_t rq_psn;
  uint32_t sq_psn;
  uint32_t dest_qp_num;
  unsigned qp_access_flags;
  QpCap cap;
  AhAttr ah_attr;
  AhAttr alt_ah_attr;
  uint16_t pkey_index;
  uint16_t alt_pkey_index;
  uint8_t unused2[2];
  uint8_t max_rd_atomic;
  uint8_t max_dest_rd_atomic;
  uint8_t min_rnr_timer;
  uint8_t port_num;
  uint8_t timeout;
  uint8_t retry_cnt;
  uint8_t rnr_retry;
  uint8_t alt_port_num;
  uint8_t alt_timeout;
  uint32_t rate_limit;
};

struct Sge {
  uint64_t addr;
  uint32_t length;
  uint32_t lkey;
};

struct SendWr {
  uint64_t wr_id;
  SendWr* next;
  Sge* sg_list;
  int num_sge;
  WrOpcode opcode;
  unsigned send_flags;
  uint32_t imm_data;  // big-endian
  uint64_t remote_addr;
  uint32_t rkey;
  uint32_t unused1[5];
  uint64_t unused2[7];
};

struct RecvWr {
  uint64_t wr_id;
  RecvWr* next;
  Sge* sg_list;
  int num_sge;
};

struct Wc {
  uint64_t wr_id;
  WcStatus status;
  WcOpcode opcode;  // valid when status is kSuccess
  uint32_t vendor_err;
  uint32_t byte_len;
  uint32_t imm_data;
  uint32_t qp_num;
  uint32_t src_qp;
  unsigned wc_flags;
  uint16_t pkey_index;
  uint16_t slid;
  uint8_t sl;
  uint8_t dlid_path_bits;
};

struct AsyncEvent {
  union {
    Cq* cq;
    Qp* qp;
    int port_num;
  } element;
  EventType event_type;
};

// Calls on the data path go through this table of the context, not through exported functions.
struct ContextOps {
  void* unused1[11];
  int (*poll_cq)(Cq* cq, int num_entries, Wc* wc);
  int (*req_notify_cq)(Cq* cq, int solicited_only);
  void* unused2[12];
  int (*post_send)(Qp* qp, SendWr* wr, SendWr** bad_wr);
  int (*post_recv)(Qp* qp, RecvWr* wr, RecvWr** bad_wr);
  void* unused3[5];
};

struct Context {
  Device* device;
  ContextOps ops;
  int cmd_fd;
  int async_fd;
  int num_comp_vectors;
};

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_ABI_H_

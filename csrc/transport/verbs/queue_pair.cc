#include "transport/verbs/queue_pair.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "kvxfer/status.h"
#include "transport/common/socket.h"

namespace kvxfer::ibv {
namespace {

constexpr uint32_t kWantedInline = 192;

[[noreturn]] void fail(const Rail& rail, const std::string& what, int error,
                       const std::string& advice = "") {
  throw Error(StatusCode::kNoResources,
              "RDMA port " + rail.name() + ": cannot " + what + ": " + error_text(error) + advice);
}

uint32_t random_psn() {
  std::random_device source;
  return source() & 0xffffff;
}

uint32_t within(uint32_t wanted, uint32_t least, int device_limit) {
  const uint32_t limit = device_limit > 0 ? static_cast<uint32_t>(device_limit) : wanted;
  return std::max(std::min(wanted, limit), least);
}

}  // namespace

DmaBuffer::DmaBuffer(const Nic& nic, size_t bytes) : bytes_(bytes), generation_(fork_generation()) {
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw Error(StatusCode::kNoResources,
                "cannot map " + std::to_string(bytes) + " bytes: " + error_text(errno));
  }
  ::madvise(mapped, bytes, MADV_DONTFORK);
  memory_ = static_cast<std::byte*>(mapped);
  Mr* mr = nic.library->reg_mr_iova2(nic.pd.get(), memory_, bytes,
                                     reinterpret_cast<uint64_t>(memory_), kLocalWrite);
  if (!mr) {
    const int error = errno;
    ::munmap(memory_, bytes_);
    throw Error(StatusCode::kNoResources, "cannot register " + std::to_string(bytes) +
                                              " bytes with RDMA device '" + nic.name +
                                              "': " + error_text(error) +
                                              "; check the limit of locked memory (ulimit -l)");
  }
  mr_ = {mr, nic.library->dereg_mr};
}

DmaBuffer::~DmaBuffer() {
  mr_.reset();
  if (generation_ == fork_generation()) ::munmap(memory_, bytes_);
}

QueuePair::QueuePair(const Rail& rail, const VerbsOptions& options)
    : nic_(rail.nic),
      port_(rail.port),
      mtu_(static_cast<uint8_t>(rail.attr.active_mtu)),
      ethernet_(rail.attr.link_layer != kLinkInfiniBand),
      max_message_(std::max(rail.attr.max_msg_sz, 1u << 16)),
      options_(options) {
  const Library& library = *nic_->library;
  // One place is kept for the marker that flush() posts.
  QpInitAttr init{};
  init.cap.max_send_wr = within(options.send_depth + 1, 2, nic_->attr.max_qp_wr);
  init.cap.max_recv_wr = within(options.receives, 1, nic_->attr.max_qp_wr);
  init.cap.max_send_sge = 1;
  init.cap.max_recv_sge = 1;
  init.cap.max_inline_data = kWantedInline;
  init.qp_type = kReliableConnection;
  const uint32_t entries = init.cap.max_send_wr + init.cap.max_recv_wr;
  if (nic_->attr.max_cqe > 0 && entries > static_cast<uint32_t>(nic_->attr.max_cqe)) {
    throw Error(StatusCode::kNoResources,
                "RDMA device '" + nic_->name + "' has completion queues of at most " +
                    std::to_string(nic_->attr.max_cqe) + " entries: lower send_depth and receives");
  }
  receives_ = init.cap.max_recv_wr;
  send_slots_ = init.cap.max_send_wr;
  send_depth_ = init.cap.max_send_wr - 1;

  channel_ = {library.create_comp_channel(context()), library.destroy_comp_channel};
  if (!channel_) fail(rail, "make a completion channel", errno);
  ::fcntl(channel_->fd, F_SETFL, ::fcntl(channel_->fd, F_GETFL) | O_NONBLOCK);
  ::fcntl(channel_->fd, F_SETFD, FD_CLOEXEC);
  cq_ = {library.create_cq(context(), static_cast<int>(entries), nullptr, channel_.get(), 0),
         library.destroy_cq};
  if (!cq_) fail(rail, "make a completion queue of " + std::to_string(entries) + " entries", errno);
  buffer_ = std::make_unique<DmaBuffer>(*nic_, size_t{receives_ + send_slots_} * kNoticeBytes);

  init.send_cq = init.recv_cq = cq_.get();
  Qp* qp = library.create_qp(nic_->pd.get(), &init);
  if (!qp) {
    // Not every adapter takes data inline, or so much of it.
    init.cap.max_inline_data = 0;
    qp = library.create_qp(nic_->pd.get(), &init);
  }
  if (!qp) {
    fail(rail,
         "make a queue pair with " + std::to_string(init.cap.max_send_wr) + " sends and " +
             std::to_string(init.cap.max_recv_wr) + " receives",
         errno, "; lower send_depth, receives or queue_pairs");
  }
  qp_ = {qp, library.destroy_qp};
  max_inline_ = init.cap.max_inline_data;
  address_ = {qp->qp_num, random_psn()};

  QpAttr attr{};
  attr.qp_state = kInit;
  attr.port_num = port_;
  attr.qp_access_flags = kLocalWrite | kRemoteWrite;
  if (const int error =
          library.modify_qp(qp, &attr, kMaskState | kMaskPkeyIndex | kMaskPort | kMaskAccess)) {
    fail(rail, "initialise a queue pair", error);
  }
  for (uint32_t i = 0; i < receives_; ++i) {
    if (const int error = post_receive(i)) fail(rail, "post a receive", error);
  }
  if (const int error = arm()) fail(rail, "ask for completion events", error);
}

void QueuePair::connect(const RailAddress& remote, const QpAddress& remote_qp, const PortGid& ours,
                        const PortGid& theirs) {
  QpAttr attr{};
  attr.qp_state = kReadyToReceive;
  attr.path_mtu = std::min(mtu_, remote.mtu);
  attr.dest_qp_num = remote_qp.number;
  attr.rq_psn = remote_qp.psn;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = options_.min_rnr_timer;
  attr.ah_attr.port_num = port_;
  attr.ah_attr.sl = options_.service_level;
  attr.ah_attr.dlid = remote.lid;
  // InfiniBand needs the global header only to leave its subnet.
  if (ethernet_ || !std::equal(ours.bytes.begin(), ours.bytes.begin() + 8, theirs.bytes.begin())) {
    attr.ah_attr.is_global = 1;
    std::memcpy(attr.ah_attr.grh.dgid.raw, theirs.bytes.data(), theirs.bytes.size());
    attr.ah_attr.grh.sgid_index = ours.index;
    attr.ah_attr.grh.hop_limit = 64;
    attr.ah_attr.grh.traffic_class = options_.traffic_class;
  }
  const auto move = [&](int mask, const char* state) {
    if (const int error = nic_->library->modify_qp(qp_.get(), &attr, mask)) {
      throw Error(StatusCode::kNoResources,
                  "cannot bring a queue pair of " + nic_->name + ":" + std::to_string(port_) +
                      " to '" + state + "' towards " + remote.name + " (" + gid_text(ours) +
                      " to " + gid_text(theirs) + "): " + error_text(error));
    }
  };
  move(kMaskState | kMaskAddress | kMaskPathMtu | kMaskDestQpNum | kMaskReceivePsn |
           kMaskMaxDestReadAtomic | kMaskMinRnrTimer,
       "ready to receive");
  attr.qp_state = kReadyToSend;
  attr.timeout = options_.timeout;
  attr.retry_cnt = options_.retry_count;
  attr.rnr_retry = options_.rnr_retry;
  attr.sq_psn = address_.psn;
  attr.max_rd_atomic = 1;
  move(kMaskState | kMaskTimeout | kMaskRetryCount | kMaskRnrRetry | kMaskSendPsn |
           kMaskMaxReadAtomic,
       "ready to send");
}

int QueuePair::post(SendWr* first, SendWr** bad) {
  return context()->ops.post_send(qp_.get(), first, bad);
}

int QueuePair::post_receive(uint64_t index) {
  Sge where{reinterpret_cast<uint64_t>(receive_buffer(index)), kNoticeBytes, buffer_lkey()};
  RecvWr request{index, nullptr, &where, 1};
  RecvWr* bad = nullptr;
  return context()->ops.post_recv(qp_.get(), &request, &bad);
}

void QueuePair::take_events() {
  Cq* cq = nullptr;
  void* unused = nullptr;
  while (nic_->library->get_cq_event(channel_.get(), &cq, &unused) == 0) {
    nic_->library->ack_cq_events(cq, 1);
  }
}

bool QueuePair::flush(uint64_t marker) {
  QpAttr attr{};
  attr.qp_state = kError;
  // What fails here has failed already: the adapter is gone. Destroying the queue pair remains.
  if (nic_->library->modify_qp(qp_.get(), &attr, kMaskState) != 0) return false;
  SendWr request{};
  request.wr_id = marker;
  request.opcode = kSend;
  request.send_flags = kSignaled;
  SendWr* bad = nullptr;
  return post(&request, &bad) == 0;
}

}  // namespace kvxfer::ibv

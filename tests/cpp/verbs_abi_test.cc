// Our declarations of the binary interface of libibverbs, compared with the real ones where they
// are installed. Nothing happens at run time: it compiles or it does not.
#if __has_include(<infiniband/verbs.h>)

#include <infiniband/verbs.h>

#include "transport/verbs/abi.h"

namespace kvxfer::ibv {
namespace {

#define KVXFER_SAME(ours, theirs, field)                           \
  static_assert(offsetof(ours, field) == offsetof(theirs, field)); \
  static_assert(sizeof(ours::field) == sizeof(theirs::field))

static_assert(sizeof(Gid) == sizeof(ibv_gid));
static_assert(sizeof(GidEntry) == sizeof(ibv_gid_entry));
KVXFER_SAME(GidEntry, ibv_gid_entry, gid_index);
KVXFER_SAME(GidEntry, ibv_gid_entry, gid_type);
KVXFER_SAME(GidEntry, ibv_gid_entry, ndev_ifindex);

static_assert(sizeof(DeviceAttr) == sizeof(ibv_device_attr));
KVXFER_SAME(DeviceAttr, ibv_device_attr, max_mr_size);
KVXFER_SAME(DeviceAttr, ibv_device_attr, max_qp_wr);
KVXFER_SAME(DeviceAttr, ibv_device_attr, max_sge);
KVXFER_SAME(DeviceAttr, ibv_device_attr, max_cqe);
KVXFER_SAME(DeviceAttr, ibv_device_attr, max_ah);
KVXFER_SAME(DeviceAttr, ibv_device_attr, max_srq);
KVXFER_SAME(DeviceAttr, ibv_device_attr, phys_port_cnt);

static_assert(sizeof(PortAttr) == sizeof(ibv_port_attr));
KVXFER_SAME(PortAttr, ibv_port_attr, state);
KVXFER_SAME(PortAttr, ibv_port_attr, active_mtu);
KVXFER_SAME(PortAttr, ibv_port_attr, gid_tbl_len);
KVXFER_SAME(PortAttr, ibv_port_attr, max_msg_sz);
KVXFER_SAME(PortAttr, ibv_port_attr, lid);
KVXFER_SAME(PortAttr, ibv_port_attr, active_width);
KVXFER_SAME(PortAttr, ibv_port_attr, active_speed);
KVXFER_SAME(PortAttr, ibv_port_attr, link_layer);

KVXFER_SAME(Pd, ibv_pd, context);
KVXFER_SAME(Mr, ibv_mr, addr);
KVXFER_SAME(Mr, ibv_mr, length);
KVXFER_SAME(Mr, ibv_mr, lkey);
KVXFER_SAME(Mr, ibv_mr, rkey);
KVXFER_SAME(CompChannel, ibv_comp_channel, fd);
KVXFER_SAME(Cq, ibv_cq, context);
KVXFER_SAME(Cq, ibv_cq, channel);
KVXFER_SAME(Cq, ibv_cq, cq_context);
KVXFER_SAME(Cq, ibv_cq, cqe);
KVXFER_SAME(Qp, ibv_qp, context);
KVXFER_SAME(Qp, ibv_qp, qp_num);
KVXFER_SAME(Qp, ibv_qp, state);

static_assert(sizeof(QpCap) == sizeof(ibv_qp_cap));
KVXFER_SAME(QpCap, ibv_qp_cap, max_recv_wr);
KVXFER_SAME(QpCap, ibv_qp_cap, max_inline_data);
static_assert(sizeof(QpInitAttr) == sizeof(ibv_qp_init_attr));
KVXFER_SAME(QpInitAttr, ibv_qp_init_attr, send_cq);
KVXFER_SAME(QpInitAttr, ibv_qp_init_attr, recv_cq);
KVXFER_SAME(QpInitAttr, ibv_qp_init_attr, srq);
KVXFER_SAME(QpInitAttr, ibv_qp_init_attr, cap);
KVXFER_SAME(QpInitAttr, ibv_qp_init_attr, qp_type);
KVXFER_SAME(QpInitAttr, ibv_qp_init_attr, sq_sig_all);

static_assert(sizeof(GlobalRoute) == sizeof(ibv_global_route));
KVXFER_SAME(GlobalRoute, ibv_global_route, sgid_index);
KVXFER_SAME(GlobalRoute, ibv_global_route, hop_limit);
KVXFER_SAME(GlobalRoute, ibv_global_route, traffic_class);
static_assert(sizeof(AhAttr) == sizeof(ibv_ah_attr));
KVXFER_SAME(AhAttr, ibv_ah_attr, dlid);
KVXFER_SAME(AhAttr, ibv_ah_attr, sl);
KVXFER_SAME(AhAttr, ibv_ah_attr, is_global);
KVXFER_SAME(AhAttr, ibv_ah_attr, port_num);
static_assert(sizeof(QpAttr) == sizeof(ibv_qp_attr));
KVXFER_SAME(QpAttr, ibv_qp_attr, path_mtu);
KVXFER_SAME(QpAttr, ibv_qp_attr, rq_psn);
KVXFER_SAME(QpAttr, ibv_qp_attr, sq_psn);
KVXFER_SAME(QpAttr, ibv_qp_attr, dest_qp_num);
KVXFER_SAME(QpAttr, ibv_qp_attr, qp_access_flags);
KVXFER_SAME(QpAttr, ibv_qp_attr, ah_attr);
KVXFER_SAME(QpAttr, ibv_qp_attr, pkey_index);
KVXFER_SAME(QpAttr, ibv_qp_attr, max_rd_atomic);
KVXFER_SAME(QpAttr, ibv_qp_attr, max_dest_rd_atomic);
KVXFER_SAME(QpAttr, ibv_qp_attr, min_rnr_timer);
KVXFER_SAME(QpAttr, ibv_qp_attr, port_num);
KVXFER_SAME(QpAttr, ibv_qp_attr, timeout);
KVXFER_SAME(QpAttr, ibv_qp_attr, retry_cnt);
KVXFER_SAME(QpAttr, ibv_qp_attr, rnr_retry);

static_assert(sizeof(Sge) == sizeof(ibv_sge));
KVXFER_SAME(Sge, ibv_sge, length);
KVXFER_SAME(Sge, ibv_sge, lkey);
static_assert(sizeof(SendWr) == sizeof(ibv_send_wr));
KVXFER_SAME(SendWr, ibv_send_wr, next);
KVXFER_SAME(SendWr, ibv_send_wr, sg_list);
KVXFER_SAME(SendWr, ibv_send_wr, num_sge);
KVXFER_SAME(SendWr, ibv_send_wr, opcode);
KVXFER_SAME(SendWr, ibv_send_wr, send_flags);
KVXFER_SAME(SendWr, ibv_send_wr, imm_data);
static_assert(offsetof(SendWr, remote_addr) == offsetof(ibv_send_wr, wr.rdma.remote_addr));
static_assert(offsetof(SendWr, rkey) == offsetof(ibv_send_wr, wr.rdma.rkey));
static_assert(sizeof(RecvWr) == sizeof(ibv_recv_wr));
KVXFER_SAME(RecvWr, ibv_recv_wr, num_sge);
static_assert(sizeof(Wc) == sizeof(ibv_wc));
KVXFER_SAME(Wc, ibv_wc, status);
KVXFER_SAME(Wc, ibv_wc, opcode);
KVXFER_SAME(Wc, ibv_wc, vendor_err);
KVXFER_SAME(Wc, ibv_wc, byte_len);
KVXFER_SAME(Wc, ibv_wc, imm_data);
KVXFER_SAME(Wc, ibv_wc, qp_num);
KVXFER_SAME(Wc, ibv_wc, wc_flags);
static_assert(sizeof(AsyncEvent) == sizeof(ibv_async_event));
KVXFER_SAME(AsyncEvent, ibv_async_event, event_type);

KVXFER_SAME(ContextOps, ibv_context_ops, poll_cq);
KVXFER_SAME(ContextOps, ibv_context_ops, req_notify_cq);
KVXFER_SAME(ContextOps, ibv_context_ops, post_send);
KVXFER_SAME(ContextOps, ibv_context_ops, post_recv);
static_assert(sizeof(ContextOps) == sizeof(ibv_context_ops));
KVXFER_SAME(Context, ibv_context, ops);
KVXFER_SAME(Context, ibv_context, cmd_fd);
KVXFER_SAME(Context, ibv_context, async_fd);

#undef KVXFER_SAME

#define KVXFER_EQUAL(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs))

KVXFER_EQUAL(kPortDown, IBV_PORT_DOWN);
KVXFER_EQUAL(kPortActive, IBV_PORT_ACTIVE);
KVXFER_EQUAL(kLinkInfiniBand, IBV_LINK_LAYER_INFINIBAND);
KVXFER_EQUAL(kLinkEthernet, IBV_LINK_LAYER_ETHERNET);
KVXFER_EQUAL(kGidInfiniBand, IBV_GID_TYPE_IB);
KVXFER_EQUAL(kGidRoceV1, IBV_GID_TYPE_ROCE_V1);
KVXFER_EQUAL(kGidRoceV2, IBV_GID_TYPE_ROCE_V2);
KVXFER_EQUAL(kInit, IBV_QPS_INIT);
KVXFER_EQUAL(kReadyToReceive, IBV_QPS_RTR);
KVXFER_EQUAL(kReadyToSend, IBV_QPS_RTS);
KVXFER_EQUAL(kError, IBV_QPS_ERR);
KVXFER_EQUAL(kReliableConnection, IBV_QPT_RC);
KVXFER_EQUAL(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
KVXFER_EQUAL(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
KVXFER_EQUAL(kRemoteRead, IBV_ACCESS_REMOTE_READ);
KVXFER_EQUAL(kRelaxedOrdering, IBV_ACCESS_RELAXED_ORDERING);
KVXFER_EQUAL(kMaskState, IBV_QP_STATE);
KVXFER_EQUAL(kMaskAccess, IBV_QP_ACCESS_FLAGS);
KVXFER_EQUAL(kMaskPkeyIndex, IBV_QP_PKEY_INDEX);
KVXFER_EQUAL(kMaskPort, IBV_QP_PORT);
KVXFER_EQUAL(kMaskAddress, IBV_QP_AV);
KVXFER_EQUAL(kMaskPathMtu, IBV_QP_PATH_MTU);
KVXFER_EQUAL(kMaskTimeout, IBV_QP_TIMEOUT);
KVXFER_EQUAL(kMaskRetryCount, IBV_QP_RETRY_CNT);
KVXFER_EQUAL(kMaskRnrRetry, IBV_QP_RNR_RETRY);
KVXFER_EQUAL(kMaskReceivePsn, IBV_QP_RQ_PSN);
KVXFER_EQUAL(kMaskMaxReadAtomic, IBV_QP_MAX_QP_RD_ATOMIC);
KVXFER_EQUAL(kMaskMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
KVXFER_EQUAL(kMaskSendPsn, IBV_QP_SQ_PSN);
KVXFER_EQUAL(kMaskMaxDestReadAtomic, IBV_QP_MAX_DEST_RD_ATOMIC);
KVXFER_EQUAL(kMaskDestQpNum, IBV_QP_DEST_QPN);
KVXFER_EQUAL(kRdmaWrite, IBV_WR_RDMA_WRITE);
KVXFER_EQUAL(kRdmaWriteWithImm, IBV_WR_RDMA_WRITE_WITH_IMM);
KVXFER_EQUAL(kSend, IBV_WR_SEND);
KVXFER_EQUAL(kSignaled, IBV_SEND_SIGNALED);
KVXFER_EQUAL(kInline, IBV_SEND_INLINE);
KVXFER_EQUAL(kLocalLengthError, IBV_WC_LOC_LEN_ERR);
KVXFER_EQUAL(kLocalQpOperationError, IBV_WC_LOC_QP_OP_ERR);
KVXFER_EQUAL(kLocalProtectionError, IBV_WC_LOC_PROT_ERR);
KVXFER_EQUAL(kFlushed, IBV_WC_WR_FLUSH_ERR);
KVXFER_EQUAL(kLocalAccessError, IBV_WC_LOC_ACCESS_ERR);
KVXFER_EQUAL(kRemoteInvalidRequest, IBV_WC_REM_INV_REQ_ERR);
KVXFER_EQUAL(kRemoteAccessError, IBV_WC_REM_ACCESS_ERR);
KVXFER_EQUAL(kRemoteOperationError, IBV_WC_REM_OP_ERR);
KVXFER_EQUAL(kRetryExceeded, IBV_WC_RETRY_EXC_ERR);
KVXFER_EQUAL(kRnrRetryExceeded, IBV_WC_RNR_RETRY_EXC_ERR);
KVXFER_EQUAL(kFatalError, IBV_WC_FATAL_ERR);
KVXFER_EQUAL(kGeneralError, IBV_WC_GENERAL_ERR);
KVXFER_EQUAL(kWcSend, IBV_WC_SEND);
KVXFER_EQUAL(kWcRdmaWrite, IBV_WC_RDMA_WRITE);
KVXFER_EQUAL(kWcReceive, IBV_WC_RECV);
KVXFER_EQUAL(kCqError, IBV_EVENT_CQ_ERR);
KVXFER_EQUAL(kQpFatal, IBV_EVENT_QP_FATAL);
KVXFER_EQUAL(kQpRequestError, IBV_EVENT_QP_REQ_ERR);
KVXFER_EQUAL(kQpAccessError, IBV_EVENT_QP_ACCESS_ERR);
KVXFER_EQUAL(kDeviceFatal, IBV_EVENT_DEVICE_FATAL);
KVXFER_EQUAL(kPortUp, IBV_EVENT_PORT_ACTIVE);
KVXFER_EQUAL(kPortError, IBV_EVENT_PORT_ERR);

#undef KVXFER_EQUAL

}  // namespace
}  // namespace kvxfer::ibv

#endif

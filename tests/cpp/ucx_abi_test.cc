// Our declarations of UCP's binary interface, compared with the real ones where they are installed.
// Nothing happens at run time: it compiles or it does not.
#if __has_include(<ucp/api/ucp.h>)

#include <ucp/api/ucp.h>

#include "transport/ucx/abi.h"

namespace kvxfer::ucp {
namespace {

#define KVXFER_SAME(ours, theirs, field)                           \
  static_assert(offsetof(ours, field) == offsetof(theirs, field)); \
  static_assert(sizeof(ours::field) == sizeof(theirs::field))
#define KVXFER_AT(ours, field, theirs, their_field)                      \
  static_assert(offsetof(ours, field) == offsetof(theirs, their_field)); \
  static_assert(sizeof(ours::field) == sizeof(theirs::their_field))

static_assert(sizeof(Status) == sizeof(ucs_status_t));
static_assert(+kBusy == +UCS_ERR_BUSY && +kCanceled == +UCS_ERR_CANCELED &&
              +kLast == +UCS_ERR_LAST);

static_assert(kFeatureRma == UCP_FEATURE_RMA && kFeatureAm == UCP_FEATURE_AM &&
              kFeatureWakeup == UCP_FEATURE_WAKEUP);
static_assert(Params::kFeatures == UCP_PARAM_FIELD_FEATURES &&
              Params::kMtWorkersShared == UCP_PARAM_FIELD_MT_WORKERS_SHARED);
KVXFER_SAME(Params, ucp_params_t, features);
KVXFER_SAME(Params, ucp_params_t, mt_workers_shared);
KVXFER_SAME(Params, ucp_params_t, name);

static_assert(WorkerParams::kThreadMode == UCP_WORKER_PARAM_FIELD_THREAD_MODE);
static_assert(int{kThreadSerialized} == int{UCS_THREAD_MODE_SERIALIZED} &&
              int{kThreadMulti} == int{UCS_THREAD_MODE_MULTI});
static_assert(LibAttr::kMaxThreadLevel == UCP_LIB_ATTR_FIELD_MAX_THREAD_LEVEL);
KVXFER_SAME(LibAttr, ucp_lib_attr_t, field_mask);
KVXFER_SAME(LibAttr, ucp_lib_attr_t, max_thread_level);
KVXFER_SAME(WorkerParams, ucp_worker_params_t, thread_mode);
KVXFER_SAME(WorkerParams, ucp_worker_params_t, cpu_mask);
KVXFER_SAME(WorkerParams, ucp_worker_params_t, client_id);

static_assert(WorkerAttr::kAddress == UCP_WORKER_ATTR_FIELD_ADDRESS);
KVXFER_SAME(WorkerAttr, ucp_worker_attr_t, address);
KVXFER_SAME(WorkerAttr, ucp_worker_attr_t, address_length);

static_assert(MemMapParams::kAddress == UCP_MEM_MAP_PARAM_FIELD_ADDRESS &&
              MemMapParams::kLength == UCP_MEM_MAP_PARAM_FIELD_LENGTH &&
              MemMapParams::kProt == UCP_MEM_MAP_PARAM_FIELD_PROT &&
              MemMapParams::kMemoryType == UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE);
static_assert(kLocalRead == UCP_MEM_MAP_PROT_LOCAL_READ &&
              kLocalWrite == UCP_MEM_MAP_PROT_LOCAL_WRITE &&
              kRemoteWrite == UCP_MEM_MAP_PROT_REMOTE_WRITE);
static_assert(int{kHostMemory} == int{UCS_MEMORY_TYPE_HOST});
KVXFER_SAME(MemMapParams, ucp_mem_map_params_t, address);
KVXFER_SAME(MemMapParams, ucp_mem_map_params_t, length);
KVXFER_SAME(MemMapParams, ucp_mem_map_params_t, prot);
KVXFER_SAME(MemMapParams, ucp_mem_map_params_t, memory_type);

static_assert(EndpointParams::kRemoteAddress == UCP_EP_PARAM_FIELD_REMOTE_ADDRESS &&
              EndpointParams::kErrMode == UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE &&
              EndpointParams::kErrHandler == UCP_EP_PARAM_FIELD_ERR_HANDLER);
static_assert(int{kErrPeer} == int{UCP_ERR_HANDLING_MODE_PEER});
KVXFER_SAME(EndpointParams, ucp_ep_params_t, address);
KVXFER_SAME(EndpointParams, ucp_ep_params_t, err_mode);
KVXFER_SAME(EndpointParams, ucp_ep_params_t, err_handler);
KVXFER_SAME(EndpointParams, ucp_ep_params_t, local_sockaddr);

static_assert(kSendEager == UCP_AM_SEND_FLAG_EAGER && kCloseForce == UCP_EP_CLOSE_FLAG_FORCE);
static_assert(RequestParam::kCallback == UCP_OP_ATTR_FIELD_CALLBACK &&
              RequestParam::kUserData == UCP_OP_ATTR_FIELD_USER_DATA &&
              RequestParam::kFlags == UCP_OP_ATTR_FIELD_FLAGS &&
              RequestParam::kDatatype == UCP_OP_ATTR_FIELD_DATATYPE &&
              RequestParam::kMemoryType == UCP_OP_ATTR_FIELD_MEMORY_TYPE &&
              RequestParam::kMemh == UCP_OP_ATTR_FIELD_MEMH);
KVXFER_SAME(RequestParam, ucp_request_param_t, op_attr_mask);
KVXFER_SAME(RequestParam, ucp_request_param_t, flags);
KVXFER_AT(RequestParam, callback, ucp_request_param_t, cb);
KVXFER_SAME(RequestParam, ucp_request_param_t, datatype);
KVXFER_SAME(RequestParam, ucp_request_param_t, user_data);
KVXFER_SAME(RequestParam, ucp_request_param_t, memory_type);
KVXFER_SAME(RequestParam, ucp_request_param_t, memh);

static_assert(kIovDatatype == UCP_DATATYPE_IOV);
KVXFER_SAME(Iov, ucp_dt_iov_t, buffer);
KVXFER_SAME(Iov, ucp_dt_iov_t, length);

static_assert(+kInProgress == +UCS_INPROGRESS);
static_assert(AmRecvParam::kData == UCP_AM_RECV_ATTR_FLAG_DATA);
KVXFER_SAME(AmRecvParam, ucp_am_recv_param_t, recv_attr);
static_assert(AmHandlerParam::kId == UCP_AM_HANDLER_PARAM_FIELD_ID &&
              AmHandlerParam::kFlags == UCP_AM_HANDLER_PARAM_FIELD_FLAGS &&
              AmHandlerParam::kCallback == UCP_AM_HANDLER_PARAM_FIELD_CB &&
              AmHandlerParam::kArg == UCP_AM_HANDLER_PARAM_FIELD_ARG &&
              AmHandlerParam::kWholeMessage == UCP_AM_FLAG_WHOLE_MSG &&
              AmHandlerParam::kPersistentData == UCP_AM_FLAG_PERSISTENT_DATA);
KVXFER_SAME(AmHandlerParam, ucp_am_handler_param_t, id);
KVXFER_SAME(AmHandlerParam, ucp_am_handler_param_t, flags);
KVXFER_SAME(AmHandlerParam, ucp_am_handler_param_t, cb);
KVXFER_SAME(AmHandlerParam, ucp_am_handler_param_t, arg);

static_assert(PerfParam::kMessageSize == UCP_EP_PERF_PARAM_FIELD_MESSAGE_SIZE &&
              PerfAttr::kEstimatedTime == UCP_EP_PERF_ATTR_FIELD_ESTIMATED_TIME);
KVXFER_SAME(PerfParam, ucp_ep_evaluate_perf_param_t, message_size);
KVXFER_SAME(PerfAttr, ucp_ep_evaluate_perf_attr_t, estimated_time);

}  // namespace
}  // namespace kvxfer::ucp

#endif

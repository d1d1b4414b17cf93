#ifndef KVXFER_TRANSPORT_VERBS_LIBRARY_H_
#define KVXFER_TRANSPORT_VERBS_LIBRARY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "transport/verbs/abi.h"

namespace kvxfer::ibv {

// The functions of libibverbs that are used here, found at run time. Null is none of them but
// reg_dmabuf_mr, which version 34 brought.
struct Library {
  // Loads `path`; if empty, what KVXFER_VERBS_LIBRARY names; if that is not set, libibverbs.so.1.
  // It stays loaded for good: providers do not like to go. Throws Error(kNoResources) saying what
  // is missing and how to get it.
  static std::shared_ptr<const Library> load(const std::string& path);

  std::string path;

  Device** (*get_device_list)(int* count) = nullptr;
  void (*free_device_list)(Device** list) = nullptr;
  const char* (*get_device_name)(Device* device) = nullptr;
  Context* (*open_device)(Device* device) = nullptr;
  int (*close_device)(Context* context) = nullptr;
  int (*query_device)(Context* context, DeviceAttr* attr) = nullptr;
  int (*query_port)(Context* context, uint8_t port, PortAttr* attr) = nullptr;
  int (*query_gid_ex)(Context* context, uint32_t port, uint32_t index, GidEntry* entry,
                      uint32_t flags, size_t entry_size) = nullptr;
  int (*get_async_event)(Context* context, AsyncEvent* event) = nullptr;
  void (*ack_async_event)(AsyncEvent* event) = nullptr;
  Pd* (*alloc_pd)(Context* context) = nullptr;
  int (*dealloc_pd)(Pd* pd) = nullptr;
  Mr* (*reg_mr_iova2)(Pd* pd, void* address, size_t length, uint64_t iova,
                      unsigned access) = nullptr;
  Mr* (*reg_dmabuf_mr)(Pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                       int access) = nullptr;
  int (*dereg_mr)(Mr* mr) = nullptr;
  CompChannel* (*create_comp_channel)(Context* context) = nullptr;
  int (*destroy_comp_channel)(CompChannel* channel) = nullptr;
  Cq* (*create_cq)(Context* context, int entries, void* cq_context, CompChannel* channel,
                   int vector) = nullptr;
  int (*destroy_cq)(Cq* cq) = nullptr;
  int (*get_cq_event)(CompChannel* channel, Cq** cq, void** cq_context) = nullptr;
  void (*ack_cq_events)(Cq* cq, unsigned count) = nullptr;
  Qp* (*create_qp)(Pd* pd, QpInitAttr* attr) = nullptr;
  int (*modify_qp)(Qp* qp, QpAttr* attr, int mask) = nullptr;
  int (*destroy_qp)(Qp* qp) = nullptr;
  const char* (*wc_status_str)(WcStatus status) = nullptr;
};

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_LIBRARY_H_

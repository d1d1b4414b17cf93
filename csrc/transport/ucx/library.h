#ifndef KVXFER_TRANSPORT_UCX_LIBRARY_H_
#define KVXFER_TRANSPORT_UCX_LIBRARY_H_

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "transport/ucx/abi.h"

namespace kvxfer::ucp {

// The functions of libucp that are used here, found at run time. None is null.
struct Library {
  // Finds the one copy of this process: what is loaded already; else what KVXFER_UCX_PATH names, a
  // library or its folder; else the system's; else the first of `last_resort` that there is. It
  // stays loaded for good, and leaves signals and standard output to the program. Throws
  // Error(kNoResources) when there is none, when it is too old or not for several threads, or when
  // its parts come from different places. Thread-safe.
  static std::shared_ptr<const Library> load(const std::vector<std::string>& last_resort);

  std::string path;     // of the file
  std::string version;  // as "1.22.0"

  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release) = nullptr;
  Status (*lib_query)(LibAttr* attr) = nullptr;
  const char* (*status_string)(Status status) = nullptr;
  Status (*config_read)(const char* prefix, const char* file, Config** config) = nullptr;
  Status (*config_modify)(Config* config, const char* name, const char* value) = nullptr;
  void (*config_release)(Config* config) = nullptr;
  Status (*init_version)(unsigned major, unsigned minor, const Params* params, const Config* config,
                         Context** context) = nullptr;
  void (*cleanup)(Context* context) = nullptr;
  void (*context_print_info)(const Context* context, FILE* stream) = nullptr;
  Status (*mem_map)(Context* context, const MemMapParams* params, Memory** memory) = nullptr;
  Status (*mem_unmap)(Context* context, Memory* memory) = nullptr;
  Status (*rkey_pack)(Context* context, Memory* memory, void** buffer, size_t* size) = nullptr;
  void (*rkey_buffer_release)(void* buffer) = nullptr;
  Status (*worker_create)(Context* context, const WorkerParams* params, Worker** worker) = nullptr;
  void (*worker_destroy)(Worker* worker) = nullptr;
  Status (*worker_query)(Worker* worker, WorkerAttr* attr) = nullptr;
  void (*worker_release_address)(Worker* worker, Address* address) = nullptr;
  Status (*worker_get_efd)(Worker* worker, int* fd) = nullptr;
  Status (*worker_arm)(Worker* worker) = nullptr;
  unsigned (*worker_progress)(Worker* worker) = nullptr;
  Status (*worker_set_am_recv_handler)(Worker* worker, const AmHandlerParam* param) = nullptr;
  Status (*ep_create)(Worker* worker, const EndpointParams* params, Endpoint** ep) = nullptr;
  StatusPtr (*ep_close_nbx)(Endpoint* ep, const RequestParam* param) = nullptr;
  StatusPtr (*ep_flush_nbx)(Endpoint* ep, const RequestParam* param) = nullptr;
  void (*ep_print_info)(Endpoint* ep, FILE* stream) = nullptr;
  Status (*ep_evaluate_perf)(Endpoint* ep, const PerfParam* param, PerfAttr* attr) = nullptr;
  Status (*ep_rkey_unpack)(Endpoint* ep, const void* buffer, Rkey** rkey) = nullptr;
  void (*rkey_destroy)(Rkey* rkey) = nullptr;
  StatusPtr (*put_nbx)(Endpoint* ep, const void* buffer, size_t size, uint64_t remote, Rkey* rkey,
                       const RequestParam* param) = nullptr;
  StatusPtr (*am_send_nbx)(Endpoint* ep, unsigned id, const void* header, size_t header_size,
                           const void* buffer, size_t size, const RequestParam* param) = nullptr;
  void (*am_data_release)(Worker* worker, void* data) = nullptr;
  void (*request_free)(void* request) = nullptr;
};

}  // namespace kvxfer::ucp

#endif  // KVXFER_TRANSPORT_UCX_LIBRARY_H_
